// Puts a FrameScanner before gRPC's eyes. The linker sends the library's calls of recvmsg(), sendmsg(), close() and of
// SSL_read() and SSL_write() through here (--wrap), where a connection that is over the scanner's limits reads as
// ended. Where gRPC is a shared library nothing is wrapped and nothing is scanned.
#pragma once

namespace kvasir::server::rpc {

// An accepted connection of the gRPC port, before gRPC has it.
void guard_connection(int fd);

}  // namespace kvasir::server::rpc
