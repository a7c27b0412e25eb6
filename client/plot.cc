#include "client/plot.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "client/report.h"

namespace kvasir::client {
namespace {

constexpr double kWidth = 560, kHeight = 300, kLeft = 62, kRight = 14, kTop = 34, kBottom = 44;
constexpr const char* kColours[] = {"#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed"};

// A step of 1, 2 or 5 times a power of ten that gives about `count` of them.
double nice_step(double range, int count) {
  const double rough = range / count;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  for (const double m : {1.0, 2.0, 5.0}) {
    if (m * power >= rough) return m * power;
  }
  return 10 * power;
}

std::string number(double v) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.6g", std::abs(v) < 1e-12 ? 0 : v);
  return buffer;
}

std::string at(double v) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.1f", v);
  return buffer;
}

std::string label(double x, double y, const char* anchor, const std::string& text, const std::string& more = "") {
  return "<text x='" + at(x) + "' y='" + at(y) + "' text-anchor='" + anchor + "'" + more + ">" + html_escaped(text) +
         "</text>";
}

}  // namespace

std::string svg_of(const Plot& plot) {
  double x0 = 0, x1 = 0, y1 = 0;
  bool any = false;
  for (const PlotLine& line : plot.lines) {
    for (const auto& [x, y] : line.points) {
      x0 = any ? std::min(x0, x) : x;
      x1 = any ? std::max(x1, x) : x;
      y1 = std::max(y1, y);
      any = true;
    }
  }
  std::string s = "<svg viewBox='0 0 560 300' role='img' aria-label='" + html_escaped(plot.title) + "'>";
  s += label(kLeft, 18, "start", plot.title, " class='t'");
  if (!any) return s + label(kWidth / 2, kHeight / 2, "middle", "nothing to show") + "</svg>";
  if (x1 <= x0) x1 = x0 + 1;
  if (y1 <= 0) y1 = 1;
  const double y_step = nice_step(y1, 5), x_step = nice_step(x1 - x0, 7);
  y1 = std::ceil(y1 / y_step - 1e-9) * y_step;
  const auto px = [&](double x) { return kLeft + (x - x0) / (x1 - x0) * (kWidth - kLeft - kRight); };
  const auto py = [&](double y) { return kHeight - kBottom - y / y1 * (kHeight - kTop - kBottom); };

  for (double y = 0; y <= y1 + y_step / 2; y += y_step) {
    s += "<line class='g' x1='" + at(kLeft) + "' x2='" + at(kWidth - kRight) + "' y1='" + at(py(y)) + "' y2='" +
         at(py(y)) + "'/>" + label(kLeft - 6, py(y) + 4, "end", number(y));
  }
  for (double x = std::ceil(x0 / x_step) * x_step; x <= x1 + x_step * 1e-6; x += x_step) {
    s += label(px(x), kHeight - kBottom + 16, "middle", number(x));
  }
  s += label((kLeft + kWidth - kRight) / 2, kHeight - 8, "middle", plot.x_label);
  s += label(14, (kTop + kHeight - kBottom) / 2, "middle", plot.y_label,
             " transform='rotate(-90 14 " + at((kTop + kHeight - kBottom) / 2) + ")'");
  for (size_t i = 0; i < plot.lines.size(); ++i) {
    const std::string colour = kColours[i % std::size(kColours)];
    s += "<polyline fill='none' stroke='" + colour + "' stroke-width='1.8' points='";
    for (const auto& [x, y] : plot.lines[i].points) s += at(px(x)) + "," + at(py(y)) + " ";
    s += "'/>";
    for (const auto& [x, y] : plot.lines[i].points) {
      if (!plot.dots && plot.lines[i].points.size() > 1) break;  // a line of one point would not be seen
      s += "<circle r='3.2' fill='" + colour + "' cx='" + at(px(x)) + "' cy='" + at(py(y)) + "'/>";
    }
    const double x = kWidth - kRight - 130, y = kTop + 6 + 15 * static_cast<double>(i);
    if (plot.lines.size() > 1) {
      s += "<rect x='" + at(x) + "' y='" + at(y - 8) + "' width='10' height='4' fill='" + colour + "'/>" +
           label(x + 15, y - 2, "start", plot.lines[i].name);
    }
  }
  return s + "</svg>";
}

}  // namespace kvasir::client
