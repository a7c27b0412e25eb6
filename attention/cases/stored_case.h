// Stored cases (section 11 of docs/attention-ops.md): a folder with case.json and one .npy a tensor.
#pragma once

#include <map>
#include <string>

#include "attention/cases/case.h"

namespace kvasir::attention {

// File name -> contents.
using CaseFiles = std::map<std::string, Bytes>;

// Every shape, type and value is checked against the contract; an attribute or tensor that is not in it
// is refused, never ignored.
Result<Case> parse_case(const CaseFiles& files);
CaseFiles format_case(const Case& c);
// attn_output and lse, or key and value; and the cache and scale as the run left them.
CaseFiles format_output(const Case& after, const CaseOutput& out);

Result<CaseFiles> read_folder(const std::string& folder);
Status write_folder(const std::string& folder, const CaseFiles& files);

// Reads a folder, runs it, writes what came of it. Nothing is written unless all went well.
Status run_folder(const std::string& folder, const Backend& backend, const DeviceContext& context,
                  const std::string& out);

}  // namespace kvasir::attention
