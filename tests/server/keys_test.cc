// Keys at rest, and what a tenant may spend.
#include "server/keys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "server/limiter.h"

namespace kvasir::server {
namespace {

using testing::HasSubstr;

class KeysTest : public testing::Test {
 protected:
  KeysTest() {
    char name[] = "/tmp/kvasir-keys-XXXXXX";
    folder_ = mkdtemp(name);
    path_ = folder_ + "/keys.json";
  }
  ~KeysTest() override { std::filesystem::remove_all(folder_); }

  std::string add(const std::string& tenant, bool admin) {
    KeyEntry e;
    e.caller.tenant = tenant;
    e.caller.user = true;
    e.caller.admin = admin;
    e.caller.limits.concurrent = 3;
    auto key = add_key(path_, e);
    EXPECT_TRUE(key.ok()) << key.status().to_string();
    return *key;
  }

  std::string folder_, path_;
};

// root:kvasir 0640, and what Kubernetes mounts for a pod's fsGroup.
TEST_F(KeysTest, AnAdministratorsFileMayBeReadByItsGroup) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  constexpr int kOther = 65532;
  add("t", false);
  ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  ASSERT_EQ(chown(path_.c_str(), 0, kOther), 0);
  const gid_t group = getegid();
  for (const auto& [mode, read] : {std::pair{0640, true}, {0440, true}, {0660, false}, {0644, false}}) {
    ASSERT_EQ(chmod(path_.c_str(), mode), 0);
    ASSERT_EQ(setegid(kOther), 0);
    ASSERT_EQ(seteuid(kOther), 0);
    auto keys = read_keys(path_);
    ASSERT_EQ(seteuid(0), 0);
    ASSERT_EQ(setegid(group), 0);
    EXPECT_EQ(keys.ok(), read) << std::oct << mode;
    if (!read) EXPECT_THAT(keys.status().message(), HasSubstr("chmod 640"));
  }
  ASSERT_EQ(chmod(path_.c_str(), 0640), 0);
  EXPECT_FALSE(read_keys(path_).ok()) << "its own file is nobody else's";
}

TEST(KeysFile, WhatCannotBeIsRefusedByName) {
  const std::string hash(64, 'a');
  auto parse = [&](const std::string& field) {
    return parse_keys(
        R"({"keys":[{"id":"k-1","sha256":")" + hash + R"(","tenant":"t","roles":["user"],)" + field + "}]}",
        "keys.json");
  };
  ASSERT_TRUE(parse(R"("priority":-3,"weight":0.5,"concurrent":2)").ok());
  for (const auto& [field, says] : std::vector<std::pair<const char*, const char*>>{
           {R"("weight":0)", "weight"},
           {R"("weight":-1)", "weight"},
           {R"("weight":1e300)", "it must be from 0.001 to 1000"},
           {R"("weight":"heavy")", "type"},
           {R"("priority":1e300)", "priority is 1e+300"},
           {R"("priority":3000000000)", "priority is 3000000000"},
           {R"("concurrent":-1)", "concurrent is -1; it must be a whole number from 0"},
           {R"("tokens_per_minute":18446744073709551615)", "tokens_per_minute"},
           {R"("requests_per_minute":true)", "requests_per_minute is true"},
           {R"("roles":["king"])", "king"},
           {R"("tenant":"")", "tenant"}}) {
    auto entries = parse(field);
    ASSERT_FALSE(entries.ok()) << field;
    EXPECT_THAT(entries.status().message(), HasSubstr(says));
    EXPECT_THAT(entries.status().message(), HasSubstr("keys.json"));
  }
  EXPECT_FALSE(parse_keys("{\"keys\":" + std::string(10000, '[') + std::string(10000, ']') + "}", "keys.json").ok());
}

TEST_F(KeysTest, AKeyIsFoundAndIsNotInTheFile) {
  std::string ann = add("ann", false), bob = add("bob", true);
  auto store = KeyStore::open(path_);
  ASSERT_TRUE(store.ok()) << store.status().to_string();
  auto found = (*store)->find(ann);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->tenant, "ann");
  EXPECT_FALSE(found->admin);
  EXPECT_EQ(found->limits.concurrent, 3);
  EXPECT_TRUE((*store)->find(bob)->admin);
  EXPECT_FALSE((*store)->find(ann + "x"));
  EXPECT_FALSE((*store)->find(""));
  std::stringstream text;
  text << std::ifstream(path_).rdbuf();
  EXPECT_EQ(text.str().find(ann), std::string::npos);
  EXPECT_THAT(text.str(), HasSubstr(sha256_hex(ann)));
}

TEST_F(KeysTest, TheFileIsForItsOwnerOnly) {
  add("ann", false);
  struct stat info;
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  chmod(path_.c_str(), 0644);
  auto store = KeyStore::open(path_);
  ASSERT_FALSE(store.ok());
  EXPECT_THAT(store.status().message(), HasSubstr("chmod 600"));
}

TEST_F(KeysTest, ARevokedKeyStopsWithinSecondsAndABadFileChangesNothing) {
  std::string ann = add("ann", false), bob = add("bob", false);
  auto store = KeyStore::open(path_);
  ASSERT_TRUE(store.ok());
  auto list = read_keys(path_);
  ASSERT_EQ(list->size(), 2u);
  ASSERT_TRUE(revoke_key(path_, (*list)[0].id).ok());
  EXPECT_EQ(revoke_key(path_, "k-none").code(), Code::not_found);
  usleep(1'100'000);
  EXPECT_FALSE((*store)->find(ann));
  EXPECT_TRUE((*store)->find(bob));
  { std::ofstream(path_) << "{"; }
  usleep(1'100'000);
  EXPECT_TRUE((*store)->find(bob));
  EXPECT_EQ(add_key(path_, {}).status().code(), Code::invalid_argument);
}

Caller tenant(TenantLimits limits) {
  Caller c;
  c.tenant = "ann";
  c.limits = limits;
  return c;
}

// As a request comes: it asks, and is taken.
Status take(Limiter& limiter, const Caller& c, int64_t tokens) {
  KVASIR_TRY(limiter.ask(c));
  return limiter.admit(c, tokens);
}

// What was looked at costs, also when nothing came of it; looking whether there is room does not.
TEST(LimiterTest, AskingCostsAndLookingDoesNot) {
  ManualClock clock;
  Limiter limiter(clock);
  Caller c = tenant({.requests_per_minute = 2, .concurrent = 1});
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(limiter.room(c).ok());
  EXPECT_TRUE(limiter.ask(c).ok());
  EXPECT_TRUE(limiter.ask(c).ok());
  EXPECT_EQ(*limiter.room(c).retry_after(), std::chrono::seconds(30));
  EXPECT_EQ(*limiter.ask(c).retry_after(), std::chrono::seconds(30));
}

TEST(LimiterTest, RequestsAMinuteRefill) {
  ManualClock clock;
  Limiter limiter(clock);
  Caller c = tenant({.requests_per_minute = 2});
  EXPECT_TRUE(take(limiter, c, 10).ok());
  EXPECT_TRUE(take(limiter, c, 10).ok());
  Status refused = take(limiter, c, 10);
  EXPECT_EQ(refused.code(), Code::resource_exhausted);
  EXPECT_EQ(*refused.retry_after(), std::chrono::seconds(30));
  clock.advance(std::chrono::seconds(30));
  EXPECT_TRUE(take(limiter, c, 10).ok());
}

TEST(LimiterTest, OutputCountsAndAHopelessPromptIsSaidToBe) {
  ManualClock clock;
  Limiter limiter(clock);
  Caller c = tenant({.tokens_per_minute = 100});
  EXPECT_TRUE(take(limiter, c, 60).ok());
  limiter.spend(c, 100);
  EXPECT_EQ(take(limiter, c, 1).code(), Code::resource_exhausted);
  clock.advance(std::chrono::seconds(60));
  EXPECT_TRUE(take(limiter, c, 40).ok());
  EXPECT_EQ(take(limiter, c, 101).code(), Code::invalid_argument);
}

// A key without limits, or one from before its limits were set, leaves the tenant's account as it is.
TEST(LimiterTest, OneKeyWithoutLimitsDoesNotUseUpAnothers) {
  ManualClock clock;
  Limiter limiter(clock);
  Caller free = tenant({}), bound = tenant({.requests_per_minute = 3, .tokens_per_minute = 300});
  for (int i = 0; i < 1000; ++i) {
    EXPECT_TRUE(take(limiter, free, 100).ok());
    limiter.release(free);
  }
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(take(limiter, bound, 100).ok()) << i;
  EXPECT_EQ(*take(limiter, bound, 1).retry_after(), std::chrono::seconds(20));
}

TEST(LimiterTest, KeysOfDifferentLimitsShareAnAccount) {
  ManualClock clock;
  Limiter limiter(clock);
  Caller small = tenant({.requests_per_minute = 2}), large = tenant({.requests_per_minute = 600});
  EXPECT_TRUE(take(limiter, small, 1).ok());
  for (int i = 0; i < 300; ++i) EXPECT_TRUE(take(limiter, large, 1).ok()) << i;  // the other half
  EXPECT_FALSE(take(limiter, large, 1).ok());
  EXPECT_FALSE(take(limiter, small, 1).ok());
}

TEST(LimiterTest, OpenRequestsAreCounted) {
  ManualClock clock;
  Limiter limiter(clock);
  Caller c = tenant({.concurrent = 1});
  EXPECT_TRUE(take(limiter, c, 1).ok());
  EXPECT_EQ(take(limiter, c, 1).code(), Code::resource_exhausted);
  limiter.release(c);
  EXPECT_TRUE(take(limiter, c, 1).ok());
}

}  // namespace
}  // namespace kvasir::server
