// Puts a FrameScanner before gRPC's eyes. The linker sends the library's calls of recvmsg(), sendmsg(), close() and of
// SSL_read() and SSL_write() through here (--wrap), where a connection that is over the scanner's limits reads as
// ended, and epoll_ctl(), so that a connection with much to read takes turns with the others. Where gRPC is a shared
// library nothing is wrapped and nothing is scanned.
#pragma once

#include <cstdint>

namespace kvasir::server::rpc {

// An accepted connection of the gRPC port, before gRPC has it.
void guard_connection(int fd);

// What tells a descriptor from another that has its number later; 0: there is none.
uint64_t inode_of(int fd);
// Ends a connection that gRPC has, if it is still that one.
void shut_connection(int fd, uint64_t inode);

}  // namespace kvasir::server::rpc
