#include "server/http/logprobs.h"

#include <algorithm>
#include <cmath>

#include "core/cat.h"
#include "server/json_text.h"

namespace kvasir::server::http {
namespace {

void append_name(std::string& out, const text::Tokenizer& tokenizer, int32_t id, TokenNames names) {
  append_json_string(out, names == TokenNames::ids ? cat("token_id:", id) : token_shown(tokenizer, id));
}

void append_entry(std::string& out, const text::Tokenizer& tokenizer, int32_t id, float logprob, TokenNames names) {
  const std::string bytes = token_shown(tokenizer, id);
  out += "{\"token\":";
  append_name(out, tokenizer, id, names);
  out += cat(",\"logprob\":", finite_logprob(logprob), ",\"bytes\":[");
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (i > 0) out += ',';
    cat_one(out, static_cast<int>(static_cast<unsigned char>(bytes[i])));
  }
  out += ']';
}

bool goes_on(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

// Characters that begin in the bytes.
int64_t characters(std::string_view bytes) {
  return std::count_if(bytes.begin(), bytes.end(), [](char c) { return !goes_on(c); });
}

template <class Each>
void append_list(std::string& out, const std::vector<engine::TokenOut>& tokens, Each each) {
  out += '[';
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i > 0) out += ',';
    each(i, tokens[i]);
  }
  out += ']';
}

}  // namespace

float finite_logprob(float logprob) { return std::max(logprob, -9999.0f); }

std::string token_shown(const text::Tokenizer& tokenizer, int32_t id) {
  std::string bytes = tokenizer.token_bytes(id);
  return bytes.empty() ? tokenizer.token_text(id) : bytes;
}

void append_token_logprobs(std::string& out, const text::Tokenizer& tokenizer,
                           const std::vector<engine::TokenOut>& tokens, TokenNames names) {
  append_list(out, tokens, [&](size_t, const engine::TokenOut& t) {
    append_entry(out, tokenizer, t.id, t.logprob, names);
    out += ",\"top_logprobs\":[";
    for (size_t k = 0; k < t.top.size(); ++k) {
      if (k > 0) out += ',';
      append_entry(out, tokenizer, t.top[k].token, t.top[k].logprob, names);
      out += '}';
    }
    out += "]}";
  });
}

void append_chat_logprobs(std::string& out, const text::Tokenizer& tokenizer,
                          const std::vector<engine::TokenOut>& tokens, TokenNames names) {
  out += "{\"content\":";
  append_token_logprobs(out, tokenizer, tokens, names);
  out += ",\"refusal\":null}";
}

void append_completion_logprobs(std::string& out, const text::Tokenizer& tokenizer,
                                const std::vector<engine::TokenOut>& tokens, int64_t& offset, bool first_has_none,
                                size_t special_shown, TokenNames names) {
  out += "{\"tokens\":";
  append_list(out, tokens, [&](size_t, const auto& t) { append_name(out, tokenizer, t.id, names); });
  out += ",\"token_logprobs\":";
  append_list(out, tokens, [&](size_t i, const auto& t) {
    out += i == 0 && first_has_none ? std::string("null") : cat(finite_logprob(t.logprob));
  });
  out += ",\"top_logprobs\":";
  append_list(out, tokens, [&](size_t i, const auto& t) {
    if (i == 0 && first_has_none) {
      out += "null";
      return;
    }
    // The token itself is always among them, as the first, so there may be one more than was asked for.
    out += '{';
    append_name(out, tokenizer, t.id, names);
    out += cat(':', finite_logprob(t.logprob));
    for (const auto& top : t.top) {
      if (top.token == t.id) continue;
      out += ',';
      append_name(out, tokenizer, top.token, names);
      out += cat(':', finite_logprob(top.logprob));
    }
    out += '}';
  });
  out += ",\"text_offset\":";
  append_list(out, tokens, [&](size_t i, const auto& t) {
    std::string bytes = i < special_shown ? token_shown(tokenizer, t.id) : tokenizer.token_bytes(t.id);
    bool inside = !bytes.empty() && goes_on(bytes[0]) && offset > 0;  // of a character that an earlier token began
    cat_one(out, offset - (inside ? 1 : 0));
    offset += characters(bytes);
  });
  out += '}';
}

nlohmann::ordered_json token_probabilities(const text::Tokenizer& tokenizer, const engine::TokenOut& token,
                                           bool post_sampling) {
  using Json = nlohmann::ordered_json;
  auto entry = [&](int32_t id, float logprob) {
    const std::string bytes = token_shown(tokenizer, id);
    Json list = Json::array();
    for (unsigned char byte : bytes) list.push_back(byte);
    Json one{{"id", id}, {"token", bytes}, {"bytes", std::move(list)}};
    if (post_sampling)
      one["prob"] = std::exp(logprob);
    else
      one["logprob"] = finite_logprob(logprob);
    return one;
  };
  Json one = entry(token.id, token.logprob), top = Json::array();
  for (const auto& t : token.top) top.push_back(entry(t.token, t.logprob));
  one[post_sampling ? "top_probs" : "top_logprobs"] = std::move(top);
  return one;
}

void append_prompt_logprobs(std::string& out, const text::Tokenizer& tokenizer,
                            const std::vector<engine::TokenOut>& tokens) {
  append_list(out, tokens, [&](size_t i, const engine::TokenOut& t) {
    if (i == 0) {
      out += "null";
      return;
    }
    auto entry = [&](int32_t id, float logprob, const std::string& rank) {
      out += cat('"', id, "\":{\"logprob\":", finite_logprob(logprob), ",\"rank\":", rank,
                 ",\"decoded_token\":", json_string(token_shown(tokenizer, id)), '}');
    };
    out += '{';
    bool among = false;
    for (size_t k = 0; k < t.top.size(); ++k) {
      if (k > 0) out += ',';
      entry(t.top[k].token, t.top[k].logprob, cat(k + 1));
      among |= t.top[k].token == t.id;
    }
    if (!among) {  // how many are likelier is not counted
      if (!t.top.empty()) out += ',';
      entry(t.id, t.logprob, "null");
    }
    out += '}';
  });
}

}  // namespace kvasir::server::http
