#include <gmock/gmock.h>

#include <sstream>

#include "tests/cli/shell.h"
#include "tests/scratch.h"

namespace kvasir::cli {
namespace {

using ::testing::HasSubstr;

TEST(Main, NothingAskedIsAUsageErrorThatListsTheCommands) {
  Ran r = shell("");
  EXPECT_EQ(r.code, 2);
  EXPECT_THAT(r.out, HasSubstr("version"));
}

TEST(Main, AnUnknownCommandNamesTheNearest) {
  Ran r = shell("vresion");
  EXPECT_EQ(r.code, 2);
  EXPECT_THAT(r.out, HasSubstr("'vresion'"));
  EXPECT_THAT(r.out, HasSubstr("did you mean 'version'"));
}

TEST(Main, EveryListedCommandExplainsItselfWithAnExample) {
  std::istringstream lines(shell("--help").out);
  std::string line;
  int commands = 0;
  while (std::getline(lines, line)) {
    if (line.rfind("  ", 0) != 0) continue;
    std::string name = line.substr(2, line.find(' ', 2) - 2);
    Ran help = shell(name + " --help");
    EXPECT_EQ(help.code, 0) << name;
    EXPECT_THAT(help.out, HasSubstr("kvasir " + name)) << name;
    EXPECT_EQ(shell("help " + name).out, help.out) << name;
    ++commands;
  }
  EXPECT_GE(commands, 1);
}

TEST(Bench, WhereAReportCannotGoIsSaidBeforeTheLoad) {
  for (const char* flag : {"--json", "--csv", "--html", "--answers"}) {
    Ran r = shell(std::string("bench 127.0.0.1:1 --requests 1 ") + flag + " /nonexistent/report");
    EXPECT_EQ(r.code, 2) << flag;
    EXPECT_THAT(r.out, HasSubstr("/nonexistent/report cannot be written")) << flag;
  }
}

TEST(Version, ShortIsOnlyTheNumber) {
  Ran r = shell("version --short");
  EXPECT_EQ(r.code, 0);
  EXPECT_THAT(r.out, ::testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+\n"));
  EXPECT_THAT(shell("--version").out, HasSubstr("kvasir " + r.out.substr(0, r.out.size() - 1)));
}

TEST(Version, AStrangeOptionIsNamed) {
  Ran r = shell("version --shrot");
  EXPECT_EQ(r.code, 2);
  EXPECT_THAT(r.out, HasSubstr("--shrot"));
}

// What would end the server after the model has loaded is said before.
TEST(Serve, ACheckKnowsWhatTheStartWouldRefuse) {
  auto refused = [](const std::string& flags, const char* says) {
    Ran r = shell("serve --model x " + flags + " --check-config");
    EXPECT_EQ(r.code, 2) << flags;
    EXPECT_THAT(r.out, HasSubstr(says)) << flags;
  };
  refused("--host 0.0.0.0", "--allow-no-keys");
  refused("--host ''", "open to other machines");
  refused("--max-running 512", "max_tokens_per_step is 512; it must be at least 528");
  refused("--max-tokens-per-step 64", "at least 80");
  refused("--tenant-cache-share 0", "tenant-cache-share");
  refused("--max-draft 4 --max-step-ms 0", "max_draft is 4; it needs max_step_ms");
  refused("--draft-model d.gguf --max-draft 0", "draft_model is d.gguf; it needs max_draft above 0");
  refused("--draft-model d.gguf --max-step-ms 0", "draft_model is d.gguf; it needs max_step_ms");
  refused("--model-alias ''", "model_alias is empty");
  refused("--model-alias a --model-alias b --model-alias a", "model_alias 'a' is given twice");
  refused("--served-model-name a --model-alias a", "model_alias 'a' is served_model_name already");
  EXPECT_EQ(shell("serve --model x --host 0.0.0.0 --keys k.json --check-config").code, 0);
  EXPECT_EQ(shell("serve --model x --host 127.1.2.3 --check-config").code, 0);
}

TEST(Serve, WhatExcludesEachOtherIsSaidByTheFlagsNames) {
  Ran r = shell("serve --model x --kv-index offset --check-config");
  EXPECT_EQ(r.code, 2);
  EXPECT_THAT(r.out, HasSubstr("kv_index is offset"));
  EXPECT_THAT(r.out, HasSubstr("--no-prefix-cache"));
  EXPECT_EQ(shell("serve --model x --kv-index offset --no-prefix-cache --check-config").code, 0);
  EXPECT_THAT(shell("serve --model x --kv-index offset --no-prefix-cache --host-kv-memory 1MiB --check-config").out,
              HasSubstr("host_kv_memory"));
}

TEST(Health, NobodyThereIsExitCodeOneAndSaysWhere) {
  Ran r = shell("health --http 1");
  EXPECT_EQ(r.code, 1);
  EXPECT_THAT(r.out, HasSubstr("127.0.0.1:1"));
}

TEST(Completion, TheBashScriptIsValidAndKnowsCommandsAndOptions) {
  Ran r = shell("completion bash");
  EXPECT_EQ(r.code, 0);
  EXPECT_THAT(r.out, HasSubstr("health) COMPREPLY"));
  EXPECT_THAT(r.out, HasSubstr("--http"));
  EXPECT_EQ(std::system((std::string(KVASIR_EXE) + " completion bash | bash -n").c_str()), 0);
}

TEST(Completion, AnUnknownShellIsRefusedWithTheChoices) {
  Ran r = shell("completion tcsh");
  EXPECT_EQ(r.code, 2);
  EXPECT_THAT(r.out, HasSubstr("zsh"));
}

bool built(const std::string& command) { return shell("--help").out.find("\n  " + command + " ") != std::string::npos; }

TEST(Keys, AreMadeShownOnceListedAndRevoked) {
  if (!built("keys")) GTEST_SKIP() << "this build has no server";
  const ScratchFolder folder;
  const std::string file = folder.path("keys.json");
  Ran made = shell("keys add --tenant acme --role metrics --requests-per-minute 77 --weight 2.5 --keys " + file);
  EXPECT_EQ(made.code, 0) << made.out;
  std::string key = made.out.substr(0, made.out.find('\n'));
  Ran listed = shell("keys list --keys " + file);
  EXPECT_THAT(listed.out, HasSubstr("acme"));
  EXPECT_THAT(listed.out, HasSubstr("metrics"));
  for (const char* what : {"requests/min", " 77 ", " 2.5 "}) EXPECT_THAT(listed.out, HasSubstr(what));
  EXPECT_THAT(listed.out, ::testing::Not(HasSubstr(key)));
  size_t at = listed.out.find("k-");
  std::string id = listed.out.substr(at, listed.out.find(' ', at) - at);
  EXPECT_EQ(shell("keys revoke " + id + " --keys " + file).code, 0);
  EXPECT_EQ(shell("keys revoke " + id + " --keys " + file).code, 1);
  EXPECT_EQ(shell("keys add --tenant acme --role king --keys " + file).code, 2);
  EXPECT_EQ(shell("keys add --keys " + file).code, 2);
}

TEST(Serve, SaysWhatIsMissingOrMisspelt) {
  if (!built("serve")) GTEST_SKIP() << "this build has no server";
  Ran none = shell("serve");
  EXPECT_EQ(none.code, 2);
  EXPECT_THAT(none.out, HasSubstr("--model"));
  Ran misspelt = shell("serve --modle x");
  EXPECT_EQ(misspelt.code, 2);
  EXPECT_THAT(misspelt.out, HasSubstr("--model"));
  EXPECT_THAT(shell("serve --model x --page-size 70000").out, HasSubstr("between 1 and 65536"));
  EXPECT_EQ(shell("serve --model dummy:llama --check-config").code, 0);
}

TEST(Generate, AnswersPromptsFromArgumentsAndJsonLines) {
  if (!built("generate")) GTEST_SKIP() << "this build has no model";
  std::string dummy = "--model dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,ffn=64,vocab=260 --kv-memory 1MiB ";
  Ran one = shell("generate " + dummy + "--max-tokens 4 --ignore-eos hello");
  EXPECT_EQ(one.code, 0) << one.out;
  EXPECT_THAT(one.out, HasSubstr("5 prompt and 4 output tokens"));
  const ScratchFolder folder;
  std::string file = folder.file("prompts.jsonl", "{\"prompt\":\"a\"}\n{\"prompt\":\"bc\",\"max_tokens\":2}\n");
  Ran many = shell("generate " + dummy + "--max-tokens 3 --ignore-eos --json --file " + file);
  EXPECT_EQ(many.code, 0) << many.out;
  EXPECT_THAT(many.out, HasSubstr("\"completion_tokens\":3"));
  EXPECT_THAT(many.out, HasSubstr("\"completion_tokens\":2"));
  EXPECT_LT(many.out.find("\"prompt\":\"a\""), many.out.find("\"prompt\":\"bc\""));
  Ran twice =
      shell("generate " + dummy + "--page-size 4 --max-tokens 3 --ignore-eos --rounds 2 'a prompt of some length'");
  EXPECT_EQ(twice.code, 0) << twice.out;
  EXPECT_THAT(twice.out, HasSubstr("  0 of the prompt tokens were cached"));
  EXPECT_THAT(twice.out, HasSubstr("  22 of the prompt tokens were cached"));
  // One that cannot be asked fails alone, under its own name.
  file = folder.file("some.jsonl",
                     "{\"prompt\":\"a\",\"id\":\"first\"}\n{\"prompt\":\"\",\"id\":2}\n{\"prompt\":\"b\"}\n");
  Ran partly = shell("generate " + dummy + "--max-tokens 3 --ignore-eos --json --file " + file);
  EXPECT_EQ(partly.code, 1);
  EXPECT_THAT(partly.out, HasSubstr("\"id\":\"first\",\"prompt\":\"a\""));
  EXPECT_THAT(partly.out, HasSubstr("\"id\":2"));
  EXPECT_THAT(partly.out, HasSubstr("\"prompt\":\"b\""));
  EXPECT_THAT(partly.out, HasSubstr("prompt 2: "));
  EXPECT_THAT(partly.out, HasSubstr("1 of 3 prompts have no answer"));
  file = folder.file("bad.jsonl", "{\"prompt\":\"a\"}\n{\"promt\":1}\n");
  Ran bad = shell("generate " + dummy + "--file " + file);
  EXPECT_EQ(bad.code, 1);
  EXPECT_THAT(bad.out, HasSubstr("line 2"));
  EXPECT_THAT(shell("generate --model /nonexistent.gguf x").out, HasSubstr("/nonexistent.gguf"));
  // Arguments are asked beside a file, also where the file is standard input.
  file = folder.file("one.jsonl", "{\"prompt\":\"from the file\"}\n");
  Ran both = shell("generate " + dummy + "--max-tokens 1 --ignore-eos --json --file - 'an argument' < " + file);
  EXPECT_EQ(both.code, 0) << both.out;
  EXPECT_THAT(both.out, HasSubstr("\"prompt\":\"an argument\""));
  EXPECT_THAT(both.out, HasSubstr("\"prompt\":\"from the file\""));
  // A line is answered by a line, when it is the only one, too.
  file = folder.file("empty.jsonl", "{\"prompt\":\"\",\"id\":\"e\"}\n");
  Ran alone = shell("generate " + dummy + "--json --file " + file);
  EXPECT_EQ(alone.code, 1);
  EXPECT_THAT(alone.out, HasSubstr("\"id\":\"e\""));
  EXPECT_THAT(alone.out, HasSubstr("\"error\":"));
  file = folder.file("long.jsonl", "{\"prompt\":\"a\",\"max_tokens\":18446744073709551615}\n");
  EXPECT_THAT(shell("generate " + dummy + "--file " + file).out, HasSubstr("it must be at most 1000000000"));
}

TEST(Embed, SaysHowFastItWasAndRefusesWhatDraftsAnswers) {
  const std::string ask = "embed --model dummy:bert,layers=1,hidden=64,heads=4,ffn=128 ";
  const Ran ran = shell(ask + "one two");
  EXPECT_EQ(ran.code, 0);
  EXPECT_THAT(ran.out, HasSubstr("2 texts of "));
  EXPECT_THAT(ran.out, HasSubstr("tokens a second"));
  const Ran refused = shell(ask + "--draft-model dummy:llama one");
  EXPECT_NE(refused.code, 0);
  EXPECT_THAT(refused.out, HasSubstr("embeddings have no answer to draft"));
}

TEST(Generate, ADraftModelChangesNoAnswer) {
  if (!built("generate")) GTEST_SKIP() << "this build has no model";
  const std::string model = "dummy:llama,layers=2,hidden=64,heads=2,kv_heads=1,ffn=64,vocab=260";
  const std::string ask =
      "generate --kv-memory 1MiB --threads 1 --json --max-tokens 60 --ignore-eos 'Why is the sky blue?' ";
  const auto answer = [](const Ran& r) { return r.out.substr(0, r.out.find('\n')); };
  const Ran plain = shell(ask + "--max-draft 0 --model " + model),
            ahead = shell(ask + "--model " + model + ",step_ms=3 --draft-model " + model);
  EXPECT_EQ(ahead.code, 0) << ahead.out;
  EXPECT_EQ(answer(plain), answer(ahead));
  EXPECT_THAT(ahead.out, HasSubstr("draft tokens were accepted"));
  const Ran other = shell(ask + "--model " + model + " --draft-model dummy:llama,layers=1,hidden=64,vocab=300");
  EXPECT_EQ(other.code, 1);
  EXPECT_THAT(other.out, HasSubstr("it has 300 tokens, the model 260"));
}

TEST(Inspect, SaysWhatADraftModelTakes) {
  if (!built("inspect")) GTEST_SKIP() << "this build has no model";
  const std::string model = "dummy:llama,layers=3,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=260",
                    draft = "dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=260";
  // 256 bytes a token and layer: 4,096 tokens of both in 4 MiB.
  const Ran object = shell("inspect --json --kv-memory 4MiB --draft-model " + draft + " " + model);
  EXPECT_EQ(object.code, 0) << object.out;
  EXPECT_THAT(object.out, HasSubstr("\"cache_bytes\": 1048576"));
  EXPECT_THAT(object.out, HasSubstr("\"kv_memory\": 3145728"));
  EXPECT_THAT(shell("inspect --draft-model " + draft + " " + model).out, HasSubstr("draft model   "));
}

TEST(Inspect, ShowsOnlyPagesThatAServerCanHave) {
  if (!built("inspect")) GTEST_SKIP() << "this build has no model";
  EXPECT_EQ(shell("inspect dummy:llama --page-size 32").code, 0);
  EXPECT_EQ(shell("inspect dummy:llama --page-size 24").code, 0);
  const Ran odd = shell("inspect dummy:llama --page-size 65537");
  EXPECT_EQ(odd.code, 2);
  EXPECT_THAT(odd.out, HasSubstr("65536"));
}

TEST(Inspect, TakesTheCacheThatFp8AttentionNeeds) {
  if (!built("inspect")) GTEST_SKIP() << "this build has no model";
  const Ran text = shell("inspect --attention-dtype fp8 dummy:llama");
  EXPECT_EQ(text.code, 0) << text.out;
  EXPECT_THAT(text.out, HasSubstr("attention     queries, keys and values in E4M3"));
  EXPECT_THAT(shell("inspect --json --attention-dtype fp8 dummy:llama").out, HasSubstr("\"kv_type\": \"fp8"));
  const Ran other = shell("inspect --attention-dtype fp8 --kv-dtype int8 dummy:llama");
  EXPECT_EQ(other.code, 2);
  EXPECT_THAT(other.out, HasSubstr("kv_dtype is int8: kv_dtype auto or fp8"));
}

TEST(Inspect, SaysWhatATokenUsesOfExperts) {
  if (!built("inspect")) GTEST_SKIP() << "this build has no model";
  const Ran text = shell("inspect dummy:qwen3-30b-a3b --batch 1 --context 1024");
  EXPECT_EQ(text.code, 0) << text.out;
  EXPECT_THAT(text.out, HasSubstr("experts       128 of 768, 8 of them and "));
  const std::string spec =
      "dummy:qwen3_moe,layers=2,hidden=64,heads=2,kv_heads=1,head_dim=32,vocab=260,experts=4,expert_ffn=32";
  const Ran object = shell("inspect --json " + spec + ",experts_used=1");
  EXPECT_THAT(object.out, HasSubstr("\"experts\": 4,"));
  EXPECT_THAT(object.out, HasSubstr("\"experts_used\": 1,"));
  // The embedding; each layer's heads, router, and 4 experts of 3 matrices, 1 of which counts.
  const int64_t all = 260 * 64 + 2 * (2 * 3 * 32 * 64 + 4 * 64 + 4 * 3 * 32 * 64);
  EXPECT_THAT(object.out, HasSubstr("\"parameters\": " + std::to_string(all)));
  EXPECT_THAT(object.out, HasSubstr("\"active_parameters\": " + std::to_string(all - 2 * 3 * 3 * 32 * 64)));
  EXPECT_THAT(shell("inspect dummy:llama --json").out, HasSubstr("\"experts\": 0,"));
  EXPECT_THAT(shell("inspect dummy:llama,experts=4").out, HasSubstr("experts is 4; it must be left out"));
}

TEST(Inspect, SaysWhatASequencesStateTakes) {
  if (!built("inspect")) GTEST_SKIP() << "this build has no model";
  // One layer of two: 3 inputs of 512 channels, and 4 heads of 64 x 64.
  const std::string bytes = std::to_string(4 * (3 * 512 + 4 * 64 * 64));
  const Ran text = shell("inspect dummy:qwen3_5 --kv-memory 64MiB --batch 1 --context 16");
  EXPECT_EQ(text.code, 0) << text.out;
  EXPECT_THAT(text.out, HasSubstr("states        " + bytes + " bytes a sequence"));
  EXPECT_THAT(text.out, HasSubstr("64 sequences and 64 prefixes"));
  const Ran object = shell("inspect --json dummy:qwen3_5 --kv-memory 64MiB");
  EXPECT_THAT(object.out, HasSubstr("\"state_bytes_per_sequence\": " + bytes));
  EXPECT_THAT(shell("inspect dummy:qwen3_5 --kv-memory 100KiB").out, HasSubstr("the state of a sequence"));
}

TEST(Perplexity, AWindowPastTheContextIsRefusedBeforeAnyMemoryIsAskedFor) {
  if (!built("perplexity")) GTEST_SKIP() << "this build has no model";
  const ScratchFolder folder;
  const std::string text = folder.file("text.txt", "some words");
  const Ran r = shell(
      "perplexity --model dummy:llama,hidden=131072,layers=1,heads=256,head_dim=512,kv_heads=1,ffn=524288 "
      "--window 1048576 --file " +
      text);
  EXPECT_EQ(r.code, 1);
  EXPECT_THAT(r.out, HasSubstr("window is 1048576; the model's context is 2048"));
}

TEST(Perplexity, ADeviceThatIsNoneIsRefused) {
  if (!built("perplexity")) GTEST_SKIP() << "this build has no model";
  const Ran r = shell("perplexity --model dummy:llama --file text.txt --device gpu");
  EXPECT_EQ(r.code, 2);
  EXPECT_THAT(r.out, HasSubstr("device is gpu"));
}

TEST(Keys, OnlyRevokeTakesAnId) {
  const Ran r = shell("keys add --tenant ann bob");
  EXPECT_EQ(r.code, 2);
  EXPECT_THAT(r.out, HasSubstr("'bob' means nothing to add"));
}

}  // namespace
}  // namespace kvasir::cli
