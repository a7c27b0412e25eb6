// Models named hf:...: what is refused, and what a download does when the other side is slow, wrong or gone.
#include "cli/hub/hub.h"

#include <gmock/gmock.h>
#include <openssl/evp.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/cli/hub_server.h"

namespace kvasir::hub {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
constexpr const char* kCommit = "0123456789abcdef0123456789abcdef01234567";

std::string digest(const EVP_MD* kind, const std::string& text) {
  unsigned char bytes[EVP_MAX_MD_SIZE];
  unsigned size = 0;
  EVP_Digest(text.data(), text.size(), bytes, &size, kind, nullptr);
  std::string out;
  char two[3];
  for (unsigned i = 0; i < size; ++i) std::snprintf(two, sizeof two, "%02x", bytes[i]), out += two;
  return out;
}

std::string noise(size_t size) {
  std::string out(size, 0);
  uint32_t x = 1;
  for (char& c : out) x = x * 1664525 + 1013904223, c = char(x >> 24);
  return out;
}

// A repository o/r of these files, as the real endpoint lists and serves them.
struct Repository {
  std::map<std::string, std::string> files;
  bool checksums = true;

  std::string listing() const {
    nlohmann::json j{{"sha", kCommit}, {"siblings", nlohmann::json::array()}};
    for (auto& [name, content] : files) {
      nlohmann::json s{{"rfilename", name}, {"size", content.size()}};
      if (checksums) s["blobId"] = digest(EVP_sha1(), cat("blob ", content.size()) + '\0' + content);
      if (checksums && !name.ends_with(".json")) s["lfs"] = {{"sha256", digest(EVP_sha256(), content)}};
      j["siblings"].push_back(s);
    }
    return j.dump();
  }
  Reply serve(const Asked& a) const {
    if (a.target == "/api/models/o/r/revision/main?blobs=true")
      return {.fields = {"Content-Type: application/json"}, .body = listing(), .chunked = true};
    for (auto& [name, content] : files)
      if (a.target == cat("/o/r/resolve/", kCommit, "/", name)) return ranged(content, a);
    return {.status = 404};
  }
  static Reply ranged(const std::string& content, const Asked& a) {
    std::string range = a.field("range");
    if (range.empty()) return {.body = content};
    size_t from = std::stoul(range.substr(6));
    return {.status = 206,
            .fields = {cat("Content-Range: bytes ", from, "-", content.size() - 1, "/", content.size())},
            .body = content.substr(from)};
  }
};

struct Hub : ::testing::Test {
  Hub() : folder(fs::temp_directory_path() / cat("kvasir-hub-", getpid())) {
    fs::remove_all(folder);
    for (const char* name : {"HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE"}) unsetenv(name);
  }
  ~Hub() override { fs::remove_all(folder); }
  HubOptions options(const HubServer& server) const {
    HubOptions o;
    o.endpoint = server.url();
    o.folder = folder.string();
    o.token = "secret";
    o.download.retry_wait = std::chrono::milliseconds(1);
    return o;
  }
  static std::string read(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  int parts() const {
    int n = 0;
    for (auto& e : fs::recursive_directory_iterator(folder)) n += e.path().extension() == ".part";
    return n;
  }
  fs::path folder;
  Repository repository{.files = {{"m.gguf", noise(300000)}, {"README.md", "x"}}};
  HubServer::Handler plain = [this](const Asked& a) { return repository.serve(a); };
};

TEST_F(Hub, AFileComesOnceAndIsThenUsedWithoutAsking) {
  std::string path;
  {
    HubServer server(plain);
    auto got = local_model("hf:o/r:m.gguf", options(server));
    ASSERT_TRUE(got.ok()) << got.status().to_string();
    path = *got;
    EXPECT_EQ(server.asked().size(), 2u);
    EXPECT_EQ(server.asked()[0].field("authorization"), "Bearer secret");
    HubOptions offline = options(server);
    offline.endpoint = "http://127.0.0.1:1", offline.offline = true;
    EXPECT_EQ(*local_model("hf:o/r:m.gguf", offline), path);
  }
  EXPECT_EQ(path, (folder / "o/r/m.gguf").string());
  EXPECT_EQ(read(path), repository.files["m.gguf"]);
  EXPECT_EQ(parts(), 0);
}

TEST_F(Hub, TheOnlyModelNeedsNoNameAndOtherNamesAreThemselves) {
  HubServer server(plain);
  EXPECT_EQ(*local_model("hf:o/r", options(server)), (folder / "o/r/m.gguf").string());
  EXPECT_EQ(*local_model("/some/file", options(server)), "/some/file");
}

TEST_F(Hub, TheTokenStaysWithItsHost) {
  HubServer store([&](const Asked& a) { return Repository::ranged(repository.files["m.gguf"], a); });
  HubServer server([&](const Asked& a) {
    if (a.target.starts_with("/api/")) return repository.serve(a);
    return Reply{.status = 302, .fields = {"Location: " + store.url() + "/blob?signature=1"}};
  });
  auto got = local_model("hf:o/r:m.gguf", options(server));
  ASSERT_TRUE(got.ok()) << got.status().to_string();
  EXPECT_EQ(read(*got), repository.files["m.gguf"]);
  ASSERT_EQ(store.asked().size(), 1u);
  EXPECT_EQ(store.asked()[0].target, "/blob?signature=1");
  EXPECT_EQ(store.asked()[0].field("authorization"), "");
  EXPECT_EQ(server.asked()[1].field("authorization"), "Bearer secret");
}

TEST_F(Hub, ABrokenConnectionGoesOnWhereItEnded) {
  std::vector<std::string> ranges;
  HubServer server([&](const Asked& a) {
    Reply r = repository.serve(a);
    if (a.target.find("resolve") != std::string::npos) ranges.push_back(a.field("range")), r.cut = 100000;
    return r;
  });
  auto got = local_model("hf:o/r:m.gguf", options(server));
  ASSERT_TRUE(got.ok()) << got.status().to_string();
  EXPECT_EQ(read(*got), repository.files["m.gguf"]);
  EXPECT_EQ(ranges, (std::vector<std::string>{"", "bytes=100000-", "bytes=200000-"}));
}

TEST_F(Hub, AnotherProcessGoesOnToo) {
  bool broken = true;
  std::string last;
  HubServer server([&](const Asked& a) {
    Reply r = repository.serve(a);
    if (a.target.find("resolve") == std::string::npos) return r;
    last = a.field("range");
    if (broken && !last.empty()) return Reply{.status = 503};
    if (broken) r.cut = 123456;
    return r;
  });
  HubOptions o = options(server);
  o.download.tries = 2;
  auto failed = local_model("hf:o/r:m.gguf", o);
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.status().code(), Code::unavailable);
  EXPECT_FALSE(fs::exists(folder / "o/r/m.gguf"));
  EXPECT_EQ(parts(), 1);
  broken = false;
  auto got = local_model("hf:o/r:m.gguf", o);
  ASSERT_TRUE(got.ok()) << got.status().to_string();
  EXPECT_EQ(last, "bytes=123456-");
  EXPECT_EQ(read(*got), repository.files["m.gguf"]);
}

TEST_F(Hub, AServerWithoutRangesBeginsAnew) {
  int times = 0;
  HubServer server([&](const Asked& a) {
    if (a.target.starts_with("/api/")) return repository.serve(a);
    return Reply{.body = repository.files["m.gguf"], .cut = ++times == 1 ? size_t(5000) : std::string::npos};
  });
  auto got = local_model("hf:o/r:m.gguf", options(server));
  ASSERT_TRUE(got.ok()) << got.status().to_string();
  EXPECT_EQ(times, 2);
  EXPECT_EQ(read(*got), repository.files["m.gguf"]);
}

TEST_F(Hub, WrongBytesAreThrownAway) {
  HubServer server([&](const Asked& a) {
    Reply r = repository.serve(a);
    if (a.target.find("resolve") != std::string::npos) r.body[1000] ^= 1;
    return r;
  });
  auto got = local_model("hf:o/r:m.gguf", options(server));
  ASSERT_FALSE(got.ok());
  EXPECT_EQ(got.status().code(), Code::data_loss);
  EXPECT_THAT(got.status().message(), HasSubstr("checksum"));
  EXPECT_FALSE(fs::exists(folder / "o/r/m.gguf"));
  EXPECT_EQ(parts(), 0);
}

TEST_F(Hub, AWrongLengthOrRangeIsRefused) {
  std::string content = repository.files["m.gguf"];
  Reply reply{.body = content + "more"};
  HubServer server([&](const Asked& a) { return a.target.starts_with("/api/") ? repository.serve(a) : reply; });
  EXPECT_THAT(local_model("hf:o/r:m.gguf", options(server)).status().message(), HasSubstr("300000"));
  reply.chunked = true;  // no length said: the bytes themselves are too many
  EXPECT_THAT(local_model("hf:o/r:m.gguf", options(server)).status().message(), HasSubstr("longer than"));
  fs::remove_all(folder);
  reply = {.status = 206, .fields = {"Content-Range: bytes 7-299999/300000"}, .body = content.substr(7)};
  EXPECT_EQ(local_model("hf:o/r:m.gguf", options(server)).status().code(), Code::data_loss);
}

TEST_F(Hub, AFolderOfSafetensorsComesWhole) {
  repository.files = {{"config.json", "{}"},
                      {"tokenizer.json", "[1]"},
                      {"generation_config.json", "{}"},
                      {"model.safetensors.index.json", "{\"x\":1}"},
                      {"model-00001-of-00002.safetensors", noise(1000)},
                      {"model-00002-of-00002.safetensors", noise(2000)},
                      {"pytorch_model.bin", "x"}};
  HubServer server(plain);
  auto got = local_model("hf:o/r", options(server));
  ASSERT_TRUE(got.ok()) << got.status().to_string();
  EXPECT_EQ(*got, (folder / "o/r").string());
  for (const char* name : {"config.json", "tokenizer.json", "model-00002-of-00002.safetensors"})
    EXPECT_EQ(read(folder / "o/r" / name), repository.files[name]) << name;
  EXPECT_FALSE(fs::exists(folder / "o/r/pytorch_model.bin"));
  // A file that is gone is not believed to be there.
  fs::remove(folder / "o/r/tokenizer.json");
  ASSERT_TRUE(local_model("hf:o/r", options(server)).ok());
  EXPECT_TRUE(fs::exists(folder / "o/r/tokenizer.json"));
}

TEST_F(Hub, AFolderAsMistralPublishesItComesWhole) {
  repository.files = {{"params.json", "{}"},
                      {"tekken.json", "{\"x\":1}"},
                      {"consolidated.safetensors", noise(1000)},
                      {"README.md", "x"}};
  HubServer server(plain);
  auto got = local_model("hf:o/r", options(server));
  ASSERT_TRUE(got.ok()) << got.status().to_string();
  for (const char* name : {"params.json", "tekken.json", "consolidated.safetensors"})
    EXPECT_EQ(read(folder / "o/r" / name), repository.files[name]) << name;
  EXPECT_FALSE(fs::exists(folder / "o/r/README.md"));
}

// Of what is there in both forms Hugging Face's comes; of vocabularies tokenizer.json, where there is one.
TEST_F(Hub, WhatIsThereTwiceComesOnce) {
  repository.files = {{"params.json", "{}"},
                      {"config.json", "{\"y\":1}"},
                      {"tekken.json", "{\"x\":1}"},
                      {"tokenizer.json", "[1]"},
                      {"consolidated.safetensors", noise(1000)},
                      {"model.safetensors", noise(1001)}};
  HubServer server(plain);
  ASSERT_TRUE(local_model("hf:o/r", options(server)).ok());
  EXPECT_TRUE(fs::exists(folder / "o/r/model.safetensors"));
  for (const char* name : {"params.json", "tekken.json", "consolidated.safetensors"})
    EXPECT_FALSE(fs::exists(folder / "o/r" / name)) << name;
}

TEST_F(Hub, AllPartsOfASplitModelCome) {
  repository.files = {{"a-00001-of-00002.gguf", noise(10)}, {"a-00002-of-00002.gguf", noise(20)}};
  HubServer server(plain);
  EXPECT_EQ(*local_model("hf:o/r", options(server)), (folder / "o/r/a-00001-of-00002.gguf").string());
  EXPECT_TRUE(fs::exists(folder / "o/r/a-00002-of-00002.gguf"));
  repository.files.erase("a-00002-of-00002.gguf");
  fs::remove_all(folder);
  EXPECT_THAT(local_model("hf:o/r", options(server)).status().message(), HasSubstr("1 of the 2 parts"));
}

TEST_F(Hub, NamesThatAreNoneAreRefused) {
  for (const char* name : {"hf:", "hf:o", "hf:o/r/s", "hf:../r", "hf:o/..", "hf:o/r:", "hf:o/r:../m.gguf",
                           "hf:o/r:/m.gguf", "hf:o/r:a/../m.gguf", "hf:o/r:m.bin", "hf:o/r?x", "hf:o r/x"}) {
    auto parsed = parse_hub_name(name);
    ASSERT_FALSE(parsed.ok()) << name;
    EXPECT_EQ(parsed.status().field(), "model");
    EXPECT_THAT(parsed.status().message(), HasSubstr(name));
  }
}

TEST_F(Hub, WhatIsNotToBeHadIsRefusedInWords) {
  HubServer server(plain);
  auto refused = [&](const char* name, const HubOptions& o, const char* words) {
    auto got = local_model(name, o);
    ASSERT_FALSE(got.ok()) << words;
    EXPECT_THAT(got.status().message(), HasSubstr(words));
  };
  HubOptions o = options(server), small = o, offline = o, open = o;
  small.limit.bytes = 1000, offline.offline = true, open.endpoint = "http://192.0.2.1";
  refused("hf:o/r:other.gguf", o, "it has m.gguf");
  refused("hf:o/other", o, "HTTP 404");
  refused("hf:o/r:m.gguf", small, "download_limit is 1000");
  refused("hf:o/r:m.gguf", offline, "offline");
  refused("hf:o/r:m.gguf", open, "must be https");
  repository.files["n.gguf"] = "x";
  refused("hf:o/r", o, "m.gguf, n.gguf");
  repository.checksums = false;
  refused("hf:o/r:m.gguf", o, "no checksum");
  repository.files = {{"README.md", "x"}};
  refused("hf:o/r", o, "no .gguf file");
}

TEST_F(Hub, AListingIsNotBelieved) {
  std::string listing;
  int status = 200;
  HubServer server([&](const Asked&) { return Reply{.status = status, .body = listing}; });
  auto message = [&] { return local_model("hf:o/r:m.gguf", options(server)).status().message(); };
  for (const char* text : {"", "[]", "{\"sha\":1}", "{\"sha\":\"../..\",\"siblings\":[]}"}) {
    listing = text;
    EXPECT_THAT(message(), HasSubstr("lists o/r")) << text;
  }
  auto one = [&](const std::string& name, const std::string& size, const std::string& sum) {
    listing = cat("{\"sha\":\"", kCommit, "\",\"siblings\":[{\"rfilename\":\"", name, "\",\"size\":", size,
                  ",\"lfs\":{\"sha256\":\"", sum, "\"}}]}");
    return message();
  };
  std::string sum(64, 'a');
  EXPECT_THAT(one("../m.gguf", "5", sum), HasSubstr("no file m.gguf"));
  EXPECT_THAT(one("m.gguf", "-5", sum), HasSubstr("no size"));
  EXPECT_THAT(one("m.gguf", "5", "../../x"), HasSubstr("no checksum"));
  EXPECT_THAT(one("m.gguf", "9223372036854775807", sum), HasSubstr("download_limit"));
  HubOptions large = options(server);
  large.limit.bytes = INT64_MAX;
  EXPECT_THAT(local_model("hf:o/r:m.gguf", large).status().message(), HasSubstr("bytes left"));
  status = 403;
  EXPECT_EQ(local_model("hf:o/r:m.gguf", options(server)).status().code(), Code::permission_denied);
}

TEST_F(Hub, RedirectsHaveAnEnd) {
  HubServer server([&](const Asked&) { return Reply{.status = 302, .fields = {"Location: /again"}}; });
  EXPECT_THAT(local_model("hf:o/r", options(server)).status().message(), HasSubstr("redirects more than"));
}

TEST(Url, TlsIsNeverLeft) {
  Url tls = *parse_url("https://h.example/x"), local = *parse_url("http://localhost:8/x");
  EXPECT_FALSE(redirected(tls, "http://h.example/y").ok());
  EXPECT_FALSE(redirected(tls, "http://127.0.0.1/y").ok());
  EXPECT_FALSE(redirected(local, "http://h.example/y").ok());
  EXPECT_FALSE(redirected(tls, "file:///etc/passwd").ok());
  EXPECT_TRUE(redirected(local, "http://[::1]:9/y").ok());
  EXPECT_EQ(redirected(tls, "/y?z")->target, "/y?z");
  EXPECT_FALSE(redirected(tls, "https://cdn.example/y")->same_origin(tls));
  for (const char* bad :
       {"", "h", "https://", "https://u@h", "https://h:0", "https://h:x", "https://h/a b", "https://[1"})
    EXPECT_FALSE(parse_url(bad).ok()) << bad;
  EXPECT_FALSE(parse_url("http://127.0.0.1.example")->loopback());
  EXPECT_FALSE(parse_url("http://localhost.example")->loopback());
}

TEST_F(Hub, TlsIsSpokenToWhomeverTheSystemTrusts) {
  fs::create_directories(folder);
  std::string key = (folder / "key.pem").string(), certificate = (folder / "cert.pem").string();
  std::string make =
      cat("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=t ",
          "-addext subjectAltName=IP:127.0.0.1 -keyout ", key, " -out ", certificate, " 2>/dev/null");
  ASSERT_EQ(std::system(make.c_str()), 0);
  std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> tls(SSL_CTX_new(TLS_server_method()), SSL_CTX_free);
  ASSERT_EQ(SSL_CTX_use_certificate_file(tls.get(), certificate.c_str(), SSL_FILETYPE_PEM), 1);
  ASSERT_EQ(SSL_CTX_use_PrivateKey_file(tls.get(), key.c_str(), SSL_FILETYPE_PEM), 1);
  HubServer server(plain, tls.get());
  auto stranger = local_model("hf:o/r:m.gguf", options(server));
  ASSERT_FALSE(stranger.ok());
  EXPECT_THAT(stranger.status().message(), HasSubstr("not trusted"));
  setenv("SSL_CERT_FILE", certificate.c_str(), 1);
  auto got = local_model("hf:o/r:m.gguf", options(server));
  unsetenv("SSL_CERT_FILE");
  ASSERT_TRUE(got.ok()) << got.status().to_string();
  EXPECT_EQ(read(*got), repository.files["m.gguf"]);
}

}  // namespace
}  // namespace kvasir::hub
