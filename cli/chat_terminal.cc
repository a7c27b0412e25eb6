#include "cli/chat_terminal.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <termios.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <mutex>

namespace kvasir::cli {
namespace {

std::mutex raw_mutex;  // guards what follows
bool raw = false;
termios found{};

constexpr size_t kMostEchoed = 4000;

void say(std::string_view text) { std::fwrite(text.data(), 1, text.size(), stderr); }

// Keys come one by one and unseen, Ctrl-C and Ctrl-Z too; what is pasted comes marked.
bool make_raw() {
  std::lock_guard lock(raw_mutex);
  if (raw) return true;
  if (tcgetattr(STDIN_FILENO, &found) != 0) return false;
  termios t = found;
  t.c_lflag &= ~tcflag_t(ICANON | ECHO | ISIG | IEXTEN);
  t.c_iflag &= ~tcflag_t(ICRNL | INLCR | IXON);
  t.c_cc[VMIN] = 1;
  t.c_cc[VTIME] = 0;
  if (tcsetattr(STDIN_FILENO, TCSADRAIN, &t) != 0) return false;
  raw = true;
  say("\033[?2004h");
  return true;
}

int columns() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

void ChatTerminal::restore() {
  std::lock_guard lock(raw_mutex);
  if (!raw) return;
  say("\033[?2004l");
  tcsetattr(STDIN_FILENO, TCSADRAIN, &found);
  raw = false;
}

ChatTerminal::ChatTerminal() {
  const char* term = std::getenv("TERM");
  const bool dumb = !term || !*term || std::string_view(term) == "dumb";
  edits_ = !dumb && isatty(STDIN_FILENO) && isatty(STDERR_FILENO);
  const char* no_color = std::getenv("NO_COLOR");
  styles_ = !dumb && isatty(STDERR_FILENO) && !(no_color && *no_color);
  if (!edits_) return;
  sigset_t resize;
  sigemptyset(&resize);
  sigaddset(&resize, SIGWINCH);
  pthread_sigmask(SIG_BLOCK, &resize, nullptr);
  resized_ = signalfd(-1, &resize, SFD_NONBLOCK | SFD_CLOEXEC);
}

ChatTerminal::~ChatTerminal() {
  restore();
  if (resized_ >= 0) close(resized_);
}

void ChatTerminal::note(std::string_view text) const {
  std::fprintf(stderr, "%s%.*s%s\n", styles_ ? "\033[2m" : "", int(text.size()), text.data(), styles_ ? "\033[0m" : "");
}

ChatTerminal::Read ChatTerminal::read(std::string_view prompt, std::string& line) {
  if (!edits_ || !make_raw()) return plain(prompt, line);
  const Read result = edit(prompt, line);
  restore();
  return result;
}

ChatTerminal::Read ChatTerminal::plain(std::string_view prompt, std::string& line) {
  say(prompt);
  return std::getline(std::cin, line) ? Read::line : Read::end;
}

void ChatTerminal::draw(std::string_view prompt) const { say('\r' + editor_.drawn(prompt, columns())); }

// The whole line in place of the part that was seen, so that it can be read again above the answer.
void ChatTerminal::finish(std::string_view prompt) const {
  std::string text = editor_.text();
  if (text.size() > kMostEchoed) return say("\n");
  say("\r\033[K");
  say(prompt);
  say(text + '\n');
}

ChatTerminal::Read ChatTerminal::edit(std::string_view prompt, std::string& line) {
  using Event = client::LineEditor::Event;
  draw(prompt);
  for (;;) {
    while (!pending_.empty()) {
      const char byte = pending_.front();
      pending_.erase(0, 1);
      switch (editor_.feed(byte)) {
        case Event::none: break;
        case Event::line:
          finish(prompt);
          line = editor_.take();
          return Read::line;
        case Event::interrupt: {
          const bool typed = !editor_.empty();
          draw(prompt);
          say(typed ? "^C\n" : "\n");
          editor_.clear();
          if (!typed) return Read::interrupt;
          break;
        }
        case Event::end: say("\n"); return Read::end;
        case Event::suspend:
          say("\n");
          restore();
          raise(SIGTSTP);
          if (!make_raw()) return Read::end;
          break;
        case Event::clear_screen: say("\033[H\033[2J"); break;
      }
    }
    draw(prompt);
    std::array<pollfd, 2> on = {{{STDIN_FILENO, POLLIN, 0}, {resized_, POLLIN, 0}}};
    if (poll(on.data(), on.size(), -1) < 0 && errno != EINTR) return Read::end;
    signalfd_siginfo told;
    while (resized_ >= 0 && ::read(resized_, &told, sizeof told) > 0) {
    }
    if (on[0].revents == 0) continue;
    std::array<char, 4096> bytes;
    const ssize_t n = ::read(STDIN_FILENO, bytes.data(), bytes.size());
    if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) return Read::end;
    if (n > 0) pending_.append(bytes.data(), size_t(n));
  }
}

}  // namespace kvasir::cli
