// `kvasir op` as the executable: what it writes, and what it refuses with exit code 2.
#include "tests/attention/broken_cases.h"
#include "tests/cli/shell.h"

namespace kvasir::cli {
namespace {
using namespace attention;
using namespace attention::testing;

Ran op(const Scratch& folder, const std::string& more) {
  return shell("op " + folder.in() + " --out " + folder.out() + " " + more);
}

TEST(Op, WritesWhatTheLibraryComputes) {
  Scratch folder;
  const Case c = sound_case();
  for (const char* backend : {"reference", "cpu"})
    for (const char* threads : {"1", "8"}) {
      folder.put(format_case(c));
      const Ran r = op(folder, std::string("--backend ") + backend + " --threads " + threads);
      EXPECT_EQ(r.code, 0) << r.out;
      EXPECT_EQ(r.out, "");
      const Outcome want = run_on(backend, c);
      EXPECT_EQ(read_folder(folder.out()).value(), format_output(want.after, want.out)) << backend;
    }
}

TEST(Op, RefusesEachBrokenCaseWithExitCode2NamesTheCauseAndWritesNothing) {
  static_assert(std::size(kRefusals) >= 30);
  const Case c = sound_case();
  Scratch folder;
  for (const Refusal& broken : kRefusals) {
    CaseFiles files = format_case(c);
    broken.breaks(files);
    folder.put(files);
    const Ran r = op(folder, "--backend cpu");
    EXPECT_EQ(r.code, 2) << broken.says << "\n" << r.out;
    EXPECT_NE(r.out.find(broken.says), std::string::npos) << r.out << "  wanted: " << broken.says;
    EXPECT_FALSE(std::filesystem::exists(folder.out())) << "nothing may be written: " << broken.says;
  }
}

TEST(Op, RefusesAnUnknownBackEndAndAFolderThatIsNotThere) {
  Scratch folder;
  folder.put(format_case(sound_case()));
  Ran r = op(folder, "--backend tpu");
  EXPECT_EQ(r.code, 2);
  EXPECT_NE(r.out.find("reference"), std::string::npos) << r.out;
  r = shell("op " + folder.in() + "/nowhere --out " + folder.out());
  EXPECT_EQ(r.code, 2);
  EXPECT_NE(r.out.find("nowhere"), std::string::npos) << r.out;
  r = shell("op " + folder.in());
  EXPECT_EQ(r.code, 2);
  EXPECT_NE(r.out.find("--out"), std::string::npos) << r.out;
  EXPECT_FALSE(std::filesystem::exists(folder.out()));
}

TEST(Op, RefusesWhatIsNoRegularFileAndAnOutThatIsNoFolder) {
  Scratch folder;
  const std::string query = folder.in() + "/query.npy";
  const auto refused = [&](const std::string& says) {
    const Ran r = op(folder, "--backend cpu");
    EXPECT_EQ(r.code, 2) << r.out;
    EXPECT_NE(r.out.find(says), std::string::npos) << r.out;
  };
  for (const char* make : {"mkdir ", "mkfifo ", "ln -s /dev/zero "}) {
    folder.put(format_case(sound_case()));
    std::filesystem::remove(query);
    ASSERT_EQ(std::system((make + query).c_str()), 0);
    refused("query.npy is a folder, a pipe or a device");
    EXPECT_FALSE(std::filesystem::exists(folder.out()));
  }
  folder.put(format_case(sound_case()));
  std::filesystem::create_symlink("nowhere", folder.out());
  refused("is there and is no folder");
}

}  // namespace
}  // namespace kvasir::cli
