// Every file in configs/ is a configuration that the server of this build accepts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <sstream>

#include "tests/cli/shell.h"
#include "tests/scratch.h"

namespace kvasir::cli {
namespace {

std::vector<std::string> files() {
  std::vector<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator("configs"))
    if (entry.path().extension() == ".json") out.push_back(entry.path().string());
  return out;
}

TEST(Configs, EachIsAccepted) {
  ASSERT_GE(files().size(), 4u);
  for (const std::string& file : files()) {
    Ran ran = shell("serve --config " + file + " --check-config");
    EXPECT_EQ(ran.code, 0) << file << ": " << ran.out;
  }
}

TEST(Configs, APrintedOneIsAcceptedAgain) {
  for (const std::string& file : files()) {
    Ran printed = shell("serve --print-config --config " + file);
    ASSERT_EQ(printed.code, 0) << printed.out;
    const ScratchFolder folder;
    const std::string again = folder.file("printed.json", printed.out);
    Ran ran = shell("serve --check-config --config " + again);
    EXPECT_EQ(ran.code, 0) << file << ": " << ran.out << printed.out;
  }
}

TEST(Configs, AWrongOneIsRefusedWithTheNearestName) {
  const ScratchFolder folder;
  const std::string wrong = folder.file("wrong.json", R"({"model": "m.gguf", "http_prt": 1})");
  Ran ran = shell("serve --check-config --config " + wrong);
  EXPECT_EQ(ran.code, 2);
  EXPECT_THAT(ran.out, testing::HasSubstr("did you mean http_port?"));
}

}  // namespace
}  // namespace kvasir::cli
