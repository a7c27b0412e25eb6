// Puts a FrameScanner before gRPC's eyes. The linker sends the library's calls of recvmsg(), close() and SSL_read()
// through here (--wrap), where a connection that sends too much of one header block reads as ended. Where gRPC is a
// shared library nothing is wrapped and nothing is scanned.
#pragma once

namespace kvasir::server::rpc {

// An accepted connection of the gRPC port, before gRPC has it.
void guard_connection(int fd);

}  // namespace kvasir::server::rpc
