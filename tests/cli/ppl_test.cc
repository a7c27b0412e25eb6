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

// Its options: what they are here, or nothing.
struct Theirs {
  const char *name, *value, *ours;
};
constexpr Theirs kTheirs[] = {{"model_dir", "\"/m\"", "\"model\": \"/m\""},
                              {"host", "\"127.0.0.2\"", "\"host\": \"127.0.0.2\""},
                              {"port", "23333", "\"grpc_port\": 23333"},
                              {"max_running_batch", "7", "\"max_running\": 7"},
                              {"max_tokens_per_step", "777", "\"max_tokens_per_step\": 777"},
                              {"enable_prefix_cache", "false", "\"prefix_cache\": false"},
                              {"model_type", "\"llama\"", nullptr},
                              {"model_format", "\"onnx\"", nullptr},
                              {"model_param_path", "\"/m/params.json\"", nullptr},
                              {"use_pmx", "true", nullptr},
                              {"tokenizer_type", "\"sentencepiece\"", nullptr},
                              {"tokenizer_path", "\"/t\"", nullptr},
                              {"tokenizer_config_path", "\"/t.json\"", nullptr},
                              {"special_tokens", "\"x\"", nullptr},
                              {"stop_tokens", "\"2\"", nullptr},
                              {"top_p", "0.5", nullptr},
                              {"top_k", "1", nullptr},
                              {"enable_penalty", "true", nullptr},
                              {"tensor_parallel_size", "1", nullptr},
                              {"quant_method", "\"none\"", nullptr},
                              {"max_tokens_scale", "0.94", nullptr},
                              {"max_tokens_per_request", "4096", nullptr},
                              {"max_input_tokens_per_request", "4096", nullptr},
                              {"max_output_tokens_per_request", "4096", nullptr},
                              {"max_total_tokens_per_request", "8192", nullptr},
                              {"max_cooldown_request", "2", nullptr},
                              {"max_prefill_batch", "64", nullptr},
                              {"monitor_port", "23334", nullptr},
                              {"enable_profiling", "true", nullptr},
                              {"control_port", "23335", nullptr},
                              {"disable_log_stats", "true", nullptr},
                              {"disable_decoding_shm_mha", "true", nullptr},
                              {"disable_decoding_inf_mha", "true", nullptr},
                              {"disable_decoding_inf_gqa", "true", nullptr},
                              {"disable_graph_fusion", "true", nullptr},
                              {"cublas_layout_hint", "\"default\"", nullptr},
                              {"configure_decoding_attn_split_k", "1", nullptr},
                              {"specify_decoding_attn_tpb", "0", nullptr}};

std::string note(const std::string& name) { return ": " + name + " means nothing here: "; }

class Ppl : public testing::Test {
 protected:
  Ran serve(const std::string& text, const std::string& flags) {
    return shell("serve --config " + folder_.file("theirs.json", text) + " " + flags);
  }
  const ScratchFolder folder_;
};

TEST_F(Ppl, ItsFileIsTaken) {
  std::string all = "{";
  for (const Theirs& t : kTheirs) all += std::string(all.size() > 1 ? ",\n\"" : "\"") + t.name + "\": " + t.value;
  Ran ran = serve(all + "}", "--print-config");
  ASSERT_EQ(ran.code, 0) << ran.out;
  for (const Theirs& t : kTheirs) {
    if (t.ours)
      EXPECT_THAT(ran.out, AllOf(HasSubstr(t.ours), Not(HasSubstr(note(t.name)))));
    else
      EXPECT_THAT(ran.out, HasSubstr(note(t.name)));
  }
}

TEST_F(Ppl, ItsFlagsAreTaken) {
  std::string all = "serve --print-config";
  for (const Theirs& t : kTheirs) {
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
  for (const Theirs& t : kTheirs) EXPECT_THAT(ran.out, HasSubstr(t.ours ? t.ours : note(t.name)));
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
