// Scans what arrives at gRPC's connections (FrameScanner) before gRPC reads it. The linker sends the library's calls of
// recvmsg(), sendmsg(), close(), SSL_read(), SSL_write() and epoll_ctl() through here (--wrap): a connection that is
// over the scanner's limits reads as ended, one with much to read alternates with the others, and one that opens
// streams too fast is read later. Over TLS its streams are seen only once a record is deciphered: what may not be read
// yet is kept here, and epoll_wait() reports the connection as readable when it may be; the byte that gRPC then reads
// for it goes no further than BIO_write(). Where gRPC is a shared library nothing is wrapped and nothing is scanned.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "server/grpc/pacer.h"

namespace kvasir::server::rpc {

// An accepted connection of the gRPC port, before gRPC has it. `peer`: gRPC's name of its other end.
void guard_connection(int fd, std::string peer, std::shared_ptr<Pacer> pacer);
// Somebody who may has called on it: it is no stranger's.
void know_connection(const std::string& peer);
// Read on those that have rested.
void wake(const std::vector<Pacer::Connection>& rested);

// What tells a descriptor from another that has its number later; 0: there is none.
uint64_t inode_of(int fd);
// Ends a connection that gRPC has, if it is still that one.
void shut_connection(int fd, uint64_t inode);

}  // namespace kvasir::server::rpc
