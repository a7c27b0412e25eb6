#include "client/figures.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "client/report.h"

namespace kvasir::client {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Record answered(double due, double first, int tokens, double gap) {
  Record r;
  r.due = due;
  r.sent = due;
  r.first = first;
  r.counts.assign(tokens, 1);
  r.gaps.assign(tokens - 1, static_cast<float>(gap));
  r.end = first + gap * (tokens - 1);
  r.output_tokens = tokens;
  return r;
}

LoadRun two_good_one_bad() {
  client::LoadRun run;
  run.records.push_back(answered(0, 0.5, 11, 0.05));
  run.records.push_back(answered(1, 1.1, 11, 0.09));
  Record bad;
  bad.due = bad.sent = 1;
  bad.end = 1.25;
  bad.status = Status(Code::resource_exhausted, "the queue is full");
  run.records.push_back(bad);
  run.seconds = 2;
  return run;
}

TEST(Spread, PercentilesOfKnownValues) {
  std::vector<double> v;
  for (int i = 100; i >= 0; --i) v.push_back(i);
  const Spread s = spread_of(v);
  EXPECT_DOUBLE_EQ(s.p50, 50);
  EXPECT_DOUBLE_EQ(s.p99, 99);
  EXPECT_DOUBLE_EQ(s.max, 100);
  EXPECT_DOUBLE_EQ(s.mean, 50);
  EXPECT_EQ(s.curve.size(), 101u);
  EXPECT_EQ(spread_of({}).count, 0);
  EXPECT_DOUBLE_EQ(spread_of({3}).p99, 3);
}

TEST(Figures, OfARun) {
  const Figures f = figures_of(two_good_one_bad(), *parse_slo("ttft=300ms,itl=100ms"));
  EXPECT_EQ(f.good, 2);
  EXPECT_EQ(f.failed, 1);
  EXPECT_NEAR(f.ttft.max, 0.5, 1e-9);
  EXPECT_NEAR(f.ttft.curve.front(), 0.1, 1e-9);
  EXPECT_NEAR(f.tpot.max, 0.09, 1e-6);
  EXPECT_NEAR(f.e2e.max, 1.0, 1e-6);
  EXPECT_EQ(f.output_tokens, 22);
  EXPECT_NEAR(f.seconds, 2.0, 1e-6);
  EXPECT_NEAR(f.output_per_second, 11, 1e-4);
  EXPECT_NEAR(f.within_slo, 1.0 / 3, 1e-9);  // the failed one is not within
  EXPECT_EQ(f.errors.size(), 1u);
  EXPECT_EQ(f.errors.begin()->first, "RESOURCE_EXHAUSTED: the queue is full");
  int64_t tokens = 0;
  for (const Second& s : f.timeline) tokens += s.tokens;
  EXPECT_EQ(tokens, 22);
}

// Eight clients, each with one request behind the other: never more than eight at once, however many a second.
TEST(Figures, RequestsUnderWayAreThoseAtAnInstant) {
  client::LoadRun run;
  for (int client = 0; client < 8; ++client)
    for (int i = 0; i < 10; ++i) {
      Record r;
      r.due = r.sent = 0.4 * i + 0.01 * client;
      r.end = r.sent + 0.4;
      run.records.push_back(r);
    }
  run.seconds = 4.1;
  const Figures f = figures_of(run, {});
  ASSERT_EQ(f.timeline.size(), 5u);
  for (size_t s = 0; s < 4; ++s) EXPECT_EQ(f.timeline[s].running, 8) << s;
  EXPECT_EQ(f.timeline[4].running, 0);
  EXPECT_EQ(f.timeline[1].started, 16);
}

TEST(Figures, LatencyCountsFromWhenItWasDue) {
  client::LoadRun run;
  Record r = answered(1.0, 3.0, 1, 0);
  r.sent = 2.9;  // the client was late: that is latency too
  run.records.push_back(r);
  run.seconds = 3;
  const Figures f = figures_of(run, {});
  EXPECT_NEAR(f.ttft.p50, 2.0, 1e-9);
  EXPECT_NEAR(f.late.p50, 1.9, 1e-9);
}

TEST(Slo, IsReadOrRefused) {
  EXPECT_NEAR(parse_slo("ttft=500ms,e2e=10s")->e2e, 10, 1e-12);
  EXPECT_FALSE(parse_slo("")->any());
  for (const char* bad : {"ttft", "ttft=5", "speed=5ms", "itl=-1ms", "itl=xms"}) {
    EXPECT_THAT(parse_slo(bad).status().message(), HasSubstr("ttft=500ms")) << bad;
  }
}

Report hostile_report() {
  Report r;
  r.title = "<script>alert(1)</script>";
  r.command = "kvasir bench '\"><img src=x>'";
  r.settings = {{"model", "<b>&"}};
  LoadRun run = two_good_one_bad();
  run.records[2].status = Status(Code::internal, "<script>bad()</script>\xFF");
  r.figures = figures_of(run, {});
  r.sweep = "rate";
  r.points = {{1, r.figures, true}, {2, r.figures, false}};
  r.verification.compared = 1;
  r.verification.examples = {"<i>"};
  r.server = {{0, {{"requests", 0}, {"running<b>", 0}}},
              {1, {{"requests", 2}, {"running<b>", 2}}},
              {2, {{"requests", 3}, {"running<b>", 0}}}};
  return r;
}

TEST(Reports, HtmlEscapesWhateverCameFromOutsideAndNeedsNoNetwork) {
  const std::string html = html_of(hostile_report());
  EXPECT_THAT(html, Not(HasSubstr("<script")));
  EXPECT_THAT(html, Not(HasSubstr("<img")));
  EXPECT_THAT(html, Not(HasSubstr("<i>")));
  EXPECT_THAT(html, Not(HasSubstr("://")));
  size_t plots = 0;
  for (size_t at = html.find("<svg"); at != std::string::npos; at = html.find("<svg", at + 1)) ++plots;
  EXPECT_EQ(plots, 11u);  // of the server's own figures, the one that goes up and down
}

TEST(Reports, JsonReadsBackAndCompares) {
  const std::string json = json_of(hostile_report());
  const auto j = nlohmann::json::parse(json);
  EXPECT_EQ(j["figures"]["succeeded"], 2);
  EXPECT_NEAR(j["figures"]["ttft_ms"]["max"].get<double>(), 500, 1e-6);
  EXPECT_EQ(j["server"].back()["requests"], 3);
  EXPECT_EQ(j["server"][0]["seconds"], 0);
  EXPECT_EQ(j["sweep"]["points"].size(), 2u);
  const Result<std::string> table = compare(json, json);
  ASSERT_TRUE(table.ok());
  EXPECT_THAT(*table, HasSubstr("1.000"));
  EXPECT_FALSE(compare("{}", json).ok());
  EXPECT_FALSE(compare(json, "nonsense").ok());
}

TEST(Reports, TheTerminalShowsWhatChangedOnTheServersSide) {
  Report r = hostile_report();
  for (ServerSample& s : r.server) s.figures["pages_total"] = 100;
  const std::string t = server_table(r);
  EXPECT_THAT(t, HasSubstr("requests"));
  EXPECT_THAT(t, HasSubstr("at most 2"));
  EXPECT_THAT(t, Not(HasSubstr("pages_total")));  // never changed
  EXPECT_EQ(server_table({}), "");
}

TEST(Reports, AnswersAreOneLineARequest) {
  client::LoadRun run = two_good_one_bad();
  run.records[0].text = "say \"x\"\n";
  run.records[1].asked = "and then";
  Workload w;
  w.prompts = {{"first", 4}};
  const std::string lines = answers_of(w, run);
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 3);
  const auto j = nlohmann::json::parse(lines.substr(0, lines.find('\n')));
  EXPECT_EQ(j["prompt"], "first");
  EXPECT_EQ(j["answer"], "say \"x\"\n");
  EXPECT_THAT(lines, HasSubstr("\"prompt\":\"and then\""));
  EXPECT_THAT(lines, HasSubstr("RESOURCE_EXHAUSTED"));
}

TEST(Reports, CsvHasARowForEachRequest) {
  const std::string csv = csv_of(two_good_one_bad());
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 4);
  EXPECT_THAT(csv, HasSubstr("RESOURCE_EXHAUSTED"));
}

}  // namespace
}  // namespace kvasir::client
