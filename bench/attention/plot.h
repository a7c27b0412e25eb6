// A bar chart as SVG: two bars a row, shares of two limits.
#pragma once

#include <string>
#include <vector>

namespace kvasir::bench {

class Plot {
 public:
  explicit Plot(std::string title) : title_(std::move(title)) {}
  void add(std::string label, double of_read, double of_fma) { rows_.push_back({std::move(label), of_read, of_fma}); }
  bool write(const std::string& path) const;

 private:
  struct Row {
    std::string label;
    double of_read, of_fma;
  };
  std::string title_;
  std::vector<Row> rows_;
};

}  // namespace kvasir::bench
