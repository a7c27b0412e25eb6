// A run told in several ways: a table for the terminal, JSON, CSV (a row a request), the answers, and one HTML
// page with plots that needs no network. Every outside string is escaped.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "client/figures.h"
#include "client/verify.h"

namespace kvasir::client {

struct Point {  // of a sweep
  double load = 0;
  Figures figures;
  bool within = false;
};

struct Report {
  std::string title, date, command;
  std::vector<std::pair<std::string, std::string>> settings;
  Figures figures;
  std::vector<ServerSample> server;  // what the server said of itself, from before to after
  Verification verification;         // compared is 0 when it was not asked for
  std::string sweep;                 // "rate" or "concurrency"
  std::vector<Point> points;
  double best = 0;  // the highest load within the SLO; 0: none was
};

std::string table_of(const Figures& f);
std::string server_table(const Report& r);  // what changed on the server's side; empty when it said nothing
std::string json_of(const Report& r);
std::string csv_of(const LoadRun& run);
// A line of JSON a request, with what was asked and answered; of a run that kept its texts.
std::string answers_of(const Workload& workload, const LoadRun& run);
std::string html_of(const Report& r);
std::string html_escaped(const std::string& text);

// Two JSON reports beside each other.
Result<std::string> compare(const std::string& json_a, const std::string& json_b);

}  // namespace kvasir::client
