// Fields of llama.cpp's samplers and cache, as its own server, Ollama and their clients send them.
#pragma once

#include <initializer_list>

#include "server/http/fields.h"

namespace kvasir::server::http {

// Takes out what llama.cpp calls unset and another server would read as a value: n_predict -1, a seed of -1.
void drop_unset(Json& body);
// The same of `n_predict` alone, in requests of OpenAI's kind.
void drop_unset_length(Json& body);

// Samplers that are none of ours are refused unless they are off; what says how prompts are kept and shared.
// After the parameters are read: penalties may be off, and then nothing said of them matters.
void read_llama_sampling(Fields& f, GenerateInput& in);
void read_llama_cache(Fields& f, GenerateInput& in);

// Fields that say nothing here, each with a line in the log.
void pass_over(Fields& f, std::initializer_list<const char*> names, const char* why);

}  // namespace kvasir::server::http
