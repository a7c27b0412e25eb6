#include "bench/attention/plot.h"

#include <algorithm>
#include <cstdio>

namespace kvasir::bench {

bool Plot::write(const std::string& path) const {
  FILE* f = std::fopen(path.c_str(), "w");
  if (!f) return false;
  const int left = 230, width = 500, row = 18, top = 56, height = top + int(rows_.size()) * row + 20;
  std::fprintf(
      f,
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" "
      "font-size=\"11\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n"
      "<text x=\"12\" y=\"20\" font-size=\"14\">%s</text>\n"
      "<rect x=\"12\" y=\"30\" width=\"10\" height=\"10\" fill=\"#2a6f97\"/><text x=\"26\" y=\"39\">of the read "
      "bandwidth</text>\n<rect x=\"150\" y=\"30\" width=\"10\" height=\"10\" fill=\"#e07a5f\"/>"
      "<text x=\"164\" y=\"39\">of the FMA peak</text>\n",
      left + width + 60, height, title_.c_str());
  for (int tick = 0; tick <= 100; tick += 20)
    std::fprintf(f,
                 "<line x1=\"%d\" y1=\"%d\" x2=\"%d\" y2=\"%d\" stroke=\"#ddd\"/><text x=\"%d\" y=\"%d\">%d%%</text>\n",
                 left + width * tick / 100, top - 4, left + width * tick / 100, height - 14,
                 left + width * tick / 100 - 8, height - 3, tick);
  for (size_t i = 0; i < rows_.size(); ++i) {
    const int y = top + int(i) * row;
    std::fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%s</text>\n", left - 6, y + 11,
                 rows_[i].label.c_str());
    const double shares[] = {rows_[i].of_read, rows_[i].of_fma};
    for (int b = 0; b < 2; ++b)
      std::fprintf(f, "<rect x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"6\" fill=\"%s\"/>\n", left, y + b * 7,
                   width * std::min(shares[b], 1.1), b ? "#e07a5f" : "#2a6f97");
  }
  std::fprintf(f, "</svg>\n");
  return std::fclose(f) == 0;
}

}  // namespace kvasir::bench
