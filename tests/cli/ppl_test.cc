// ppl.llm.serving's own configurations, as files and as flags: taken where they mean something, said where not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/cli/shell.h"
#include "tests/scratch.h"

namespace kvasir::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

// Its options: what they are here; or the value that says what is so anyway, and one that does not.
struct Theirs {
  const char *name, *value, *ours, *wrong;
};
constexpr Theirs kTheirs[] = {
    {"model_dir", "\"/m\"", "\"model\": \"/m\"", nullptr},
    {"host", "\"127.0.0.2\"", "\"host\": \"127.0.0.2\"", nullptr},
    {"port", "23333", "\"grpc_port\": 23333", nullptr},
    {"monitor_port", "23334", "\"http_port\": 23334", nullptr},
    {"max_running_batch", "7", "\"max_running\": 7", nullptr},
    {"max_tokens_per_step", "777", "\"max_tokens_per_step\": 777", nullptr},
    {"enable_prefix_cache", "false", "\"prefix_cache\": false", nullptr},
    {"max_tokens_scale", "0.94", "\"kv_memory_share\": 0.94", nullptr},
    {"stop_tokens", "\"2,7\"", "\"stop_tokens\": \"2,7\"", "\"two\""},
    {"top_p", "0.5", "\"top_p\": 0.5", "2"},
    {"top_k", "1", "\"top_k\": 1", "-1"},
    {"enable_penalty", "false", "\"enable_penalty\": false", nullptr},
    {"max_input_tokens_per_request", "4096", "\"max_input_tokens_per_request\": 4096", "-1"},
    {"max_output_tokens_per_request", "4097", "\"max_output_tokens_per_request\": 4097", "-1"},
    {"max_total_tokens_per_request", "8192", "\"max_total_tokens_per_request\": 8192", "-1"},
    {"model_type", "\"llama\"", "\"model_type\": \"llama\"", nullptr},
    {"model_param_path", "\"/m/params.json\"", "\"model_param_path\": \"/m/params.json\"", nullptr},
    {"tokenizer_path", "\"/m/tokenizer.json\"", "\"tokenizer_path\": \"/m/tokenizer.json\"", nullptr},
    {"tokenizer_config_path", "\"/m/t.json\"", "\"tokenizer_config_path\": \"/m/t.json\"", nullptr},
    {"model_format", "\"huggingface\"", nullptr, "\"onnx\""},
    {"use_pmx", "false", nullptr, "true"},
    {"tokenizer_type", "\"huggingface\"", nullptr, "\"sentencepiece\""},
    {"special_tokens", nullptr, nullptr, "\"x\""},
    {"tensor_parallel_size", "2", "\"ranks\": 2", "0"},
    {"quant_method", "\"none\"", nullptr, "\"online_i8i8\""},
    {"max_cooldown_request", nullptr, nullptr, "2"},
    {"max_prefill_batch", nullptr, nullptr, "64"},
    {"control_port", nullptr, nullptr, "23335"},
    {"enable_profiling", "false", nullptr, "true"},
    {"disable_log_stats", "true", nullptr, "false"},
    {"disable_decoding_shm_mha", "false", nullptr, "true"},
    {"disable_decoding_inf_mha", "false", nullptr, "true"},
    {"disable_decoding_inf_gqa", "false", nullptr, "true"},
    {"disable_graph_fusion", "false", nullptr, "true"},
    {"cublas_layout_hint", "\"default\"", nullptr, "\"ampere\""},
    {"configure_decoding_attn_split_k", "1", nullptr, "0"},
    {"specify_decoding_attn_tpb", "0", nullptr, "256"}};

class Ppl : public testing::Test {
 protected:
  Ran serve(const std::string& text, const std::string& flags) {
    return shell("serve --config " + folder_.file("theirs.json", text) + " " + flags);
  }
  const ScratchFolder folder_;
};

TEST_F(Ppl, ItsFileIsTaken) {
  std::string all = "{";
  for (const Theirs& t : kTheirs)
    if (t.value) all += std::string(all.size() > 1 ? ",\n\"" : "\"") + t.name + "\": " + t.value;
  Ran ran = serve(all + "}", "--print-config");
  ASSERT_EQ(ran.code, 0) << ran.out;
  for (const Theirs& t : kTheirs)
    if (t.ours) EXPECT_THAT(ran.out, HasSubstr(t.ours));
  EXPECT_THAT(serve(all + "}", "--check-config").out, HasSubstr("the configuration is right"));
}

// What says something that is not so here is named, and then no configuration is right.
TEST_F(Ppl, WhatItsFileSaysAndIsNotSoIsRefusedByName) {
  for (const Theirs& t : kTheirs) {
    if (!t.wrong) continue;
    Ran ran = serve(std::string("{\"model_dir\": \"/m\", \"") + t.name + "\": " + t.wrong + "}", "--check-config");
    EXPECT_EQ(ran.code, 2) << t.name;
    std::string flag = t.name;
    std::replace(flag.begin(), flag.end(), '_', '-');
    EXPECT_THAT(ran.out, AnyOf(HasSubstr(t.name), HasSubstr(flag)));
    EXPECT_THAT(ran.out, Not(HasSubstr("the configuration is right")));
  }
}

TEST_F(Ppl, ItsFlagsAreTaken) {
  std::string all = "serve --print-config";
  for (const Theirs& t : kTheirs) {
    if (!t.value) continue;
    std::string flag = std::string(" --") + t.name, value = t.value;
    std::replace(flag.begin(), flag.end(), '_', '-');
    if (value == "true")
      all += flag;
    else if (value == "false")
      all += flag + "=false";
    else
      all += flag + " " + value;
  }
  Ran ran = shell(all);
  ASSERT_EQ(ran.code, 0) << ran.out;
  for (const Theirs& t : kTheirs)
    if (t.ours) EXPECT_THAT(ran.out, HasSubstr(t.ours));
}

TEST_F(Ppl, ItsFileIsCheckedAsOurs) {
  EXPECT_THAT(serve(R"({"model_dir": "/m", "port": 70000})", "--check-config").out,
              AllOf(HasSubstr("--grpc-port is 70000"), HasSubstr("65535"), HasSubstr("key \"port\"")));
  EXPECT_THAT(
      serve(R"({"model_dir": "/m", "max_running_batch": 0})", "--check-config").out,
      AllOf(HasSubstr("--max-running is 0"), HasSubstr("between 1 and"), HasSubstr("key \"max_running_batch\"")));
  Ran unknown = serve(R"({"model_dir": "/m", "max_runing_batch": 3})", "--check-config");
  EXPECT_EQ(unknown.code, 2);
  EXPECT_THAT(unknown.out, HasSubstr("max_runing_batch"));
}

}  // namespace
}  // namespace kvasir::cli
