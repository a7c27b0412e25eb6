#include "core/host.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

#include "core/cpu.h"
#include "core/numa.h"

namespace kvasir {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int64_t kMiB = 1 << 20;

// A machine made of files.
class HostTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/kvasir_host_XXXXXX";
    root_ = mkdtemp(name);
    file("/proc/meminfo", "MemTotal:       8388608 kB\nMemFree: 1 kB\nMemAvailable:   4194304 kB\n");
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void file(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  std::string root_;
};

TEST_F(HostTest, WithoutGroupsTheMachineIsTheLimit) {
  HostLimits host = host_limits(root_);
  EXPECT_EQ(host.memory_total, 8192 * kMiB);
  EXPECT_EQ(host.memory_limit, 8192 * kMiB);
  EXPECT_EQ(host.memory_available, 4096 * kMiB);
  EXPECT_EQ(host.cpu_quota, 0);
  EXPECT_GE(host.cpus, 1);
}

TEST_F(HostTest, Version2TakesTheSmallestOfAllParents) {
  file("/proc/self/cgroup", "0::/outer/inner\n");
  file("/sys/fs/cgroup/cgroup.controllers", "cpu memory\n");
  file("/sys/fs/cgroup/outer/inner/cgroup.procs", "");
  file("/sys/fs/cgroup/outer/inner/cpu.max", "max 100000\n");
  file("/sys/fs/cgroup/outer/cpu.max", "50000 100000\n");
  file("/sys/fs/cgroup/outer/inner/memory.max", "max\n");
  file("/sys/fs/cgroup/outer/memory.max", "1073741824\n");
  file("/sys/fs/cgroup/outer/memory.current", "805306368\n");
  file("/sys/fs/cgroup/outer/memory.stat", "anon 1\ninactive_file 268435456\nactive_file 5\n");
  HostLimits host = host_limits(root_);
  EXPECT_EQ(host.cpu_quota, 0.5);
  EXPECT_EQ(host.cpus, 1);
  EXPECT_EQ(host.memory_limit, 1024 * kMiB);
  EXPECT_EQ(host.memory_available, 512 * kMiB);  // 1024 - 768 used + 256 of unused page cache
}

TEST_F(HostTest, Version1InsideAContainer) {
  // The path names a folder of the machine outside; only the mount itself is visible here.
  file("/proc/self/cgroup", "4:cpu,cpuacct:/docker/abc\n7:memory:/docker/abc\n0::/docker/abc\n");
  file("/sys/fs/cgroup/cpu,cpuacct/cgroup.procs", "");
  file("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "150000\n");
  file("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  file("/sys/fs/cgroup/memory/cgroup.procs", "");
  file("/sys/fs/cgroup/memory/memory.limit_in_bytes", "2147483648\n");
  file("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1073741824\n");
  file("/sys/fs/cgroup/memory/memory.stat", "inactive_file 0\ntotal_inactive_file 104857600\n");
  HostLimits host = host_limits(root_);
  EXPECT_EQ(host.cpu_quota, 1.5);
  EXPECT_LE(host.cpus, 2);
  EXPECT_EQ(host.memory_limit, 2048 * kMiB);
  EXPECT_EQ(host.memory_available, 1124 * kMiB);
}

TEST_F(HostTest, AnUnlimitedVersion1GroupSaysNothing) {
  file("/proc/self/cgroup", "7:memory:/\n4:cpu:/\n");
  file("/sys/fs/cgroup/memory/cgroup.procs", "");
  file("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  file("/sys/fs/cgroup/cpu/cgroup.procs", "");
  file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  file("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  HostLimits host = host_limits(root_);
  EXPECT_EQ(host.memory_limit, host.memory_total);
  EXPECT_EQ(host.cpu_quota, 0);
}

TEST(Host, ThisMachine) {
  HostLimits host = host_limits();
  EXPECT_GT(host.memory_total, 0);
  EXPECT_GT(host.memory_available, 0);
  EXPECT_LE(host.memory_available, host.memory_total);
  const int64_t resident = resident_bytes();
  EXPECT_GT(resident, kMiB);
  EXPECT_GE(peak_resident_bytes(), resident);
}

TEST(Cpu, AgreesWithTheCompilersOwnDetection) {
#if defined(__x86_64__)
  if (getenv("KVASIR_ISA")) GTEST_SKIP() << "KVASIR_ISA hides features";
  __builtin_cpu_init();
  EXPECT_EQ(cpu().avx2, bool(__builtin_cpu_supports("avx2")));
  EXPECT_EQ(cpu().fma, bool(__builtin_cpu_supports("fma")));
  EXPECT_EQ(cpu().avx512, bool(__builtin_cpu_supports("avx512f")) && bool(__builtin_cpu_supports("avx512bw")) &&
                              bool(__builtin_cpu_supports("avx512dq")) && bool(__builtin_cpu_supports("avx512vl")));
  EXPECT_EQ(cpu().avx512_vnni, bool(__builtin_cpu_supports("avx512vnni")));
  EXPECT_EQ(cpu().avx512_vbmi, bool(__builtin_cpu_supports("avx512vbmi")));
  EXPECT_EQ(cpu().avx512_bf16, bool(__builtin_cpu_supports("avx512bf16")));
#else
  EXPECT_TRUE(cpu().neon);
#endif
}

TEST(Cpu, AnUnknownInstructionSetIsNamedWithThoseThereAre) {
  const char* before = getenv("KVASIR_ISA");
  const std::string kept = before ? before : "";
  setenv("KVASIR_ISA", "avx9", 1);
  EXPECT_THAT(isa_complaint(), AllOf(HasSubstr("KVASIR_ISA is 'avx9'"), HasSubstr("portable")));
  setenv("KVASIR_ISA", "portable", 1);
  EXPECT_EQ(isa_complaint(), "");
  setenv("KVASIR_ISA", "", 1);
  EXPECT_EQ(wanted_isa(), nullptr);
  EXPECT_EQ(isa_complaint(), "");
  before ? setenv("KVASIR_ISA", kept.c_str(), 1) : unsetenv("KVASIR_ISA");
}

TEST(Cpu, TheComplaintNamesWhatIsMissing) {
#if defined(__x86_64__)
  EXPECT_STREQ(cpu_complaint({.avx2 = true, .fma = true, .f16c = true}), "");
  EXPECT_NE(std::string(cpu_complaint({})).find("has no AVX2, FMA and F16C"), std::string::npos);
  EXPECT_NE(std::string(cpu_complaint({.avx2 = true, .fma = true})), "");
#endif
  require_supported_cpu();  // comes back on a machine that got this far
  EXPECT_EQ((CpuFeatures{.avx2 = true, .fma = true}.to_string()), "avx2 fma");
}

TEST_F(HostTest, NodesHaveTheProcessorsThatThisProcessMayUse) {
  EXPECT_TRUE(numa_nodes(root_).empty());
  const std::string nodes = "/sys/devices/system/node/";
  file(nodes + "node10/cpulist", "0-16383\n");
  file(nodes + "node2/cpulist", "0-16383\n");
  file(nodes + "node3/cpulist", "\n");  // memory alone
  file(nodes + "possible", "0-10\n");
  const auto found = numa_nodes(root_);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].number, 2);
  EXPECT_EQ(found[1].number, 10);
  EXPECT_EQ(int(found[0].cpus.size()), host_limits(root_).cpus);
}

TEST(Numa, ListsOfProcessors) {
  EXPECT_THAT(parse_cpu_list("0-3,8,10-11\n"), testing::ElementsAre(0, 1, 2, 3, 8, 10, 11));
  EXPECT_TRUE(parse_cpu_list("").empty());
  EXPECT_TRUE(parse_cpu_list("0-99999999").empty());
}

}  // namespace
}  // namespace kvasir
