// A line plot as SVG text.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace kvasir::client {

struct PlotLine {
  std::string name;
  std::vector<std::pair<double, double>> points;
};
struct Plot {
  std::string title, x_label, y_label;
  std::vector<PlotLine> lines;
  bool dots = false;
};
std::string svg_of(const Plot& plot);

}  // namespace kvasir::client
