// Certificates made on the spot, in a folder that goes with the test.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "core/cat.h"

namespace kvasir::server {

class TlsFiles {
 public:
  TlsFiles() {
    char name[] = "/tmp/kvasir-tls-XXXXXX";
    folder_ = mkdtemp(name);
  }
  ~TlsFiles() { std::filesystem::remove_all(folder_); }
  TlsFiles(const TlsFiles&) = delete;

  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  // who.pem and who.key, signed by itself.
  void make(const std::string& who) {
    std::string command =
        cat("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=", who,
            " -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout ", path(who + ".key"), " -out ",
            path(who + ".pem"), " 2>/dev/null");
    ASSERT_EQ(std::system(command.c_str()), 0);
  }
  // As a renewal does it: the new files are moved onto the old.
  void replace(const std::string& who, const std::string& by) {
    for (const char* end : {".key", ".pem"}) std::filesystem::rename(path(by + end), path(who + end));
  }
  void copy(const std::string& from, const std::string& to) { std::filesystem::copy_file(path(from), path(to)); }
  void write(const std::string& name, const std::string& text) { std::ofstream(path(name)) << text; }
  std::string read(const std::string& name) const {
    std::stringstream text;
    text << std::ifstream(path(name)).rdbuf();
    return text.str();
  }

 private:
  std::string folder_;
};

}  // namespace kvasir::server
