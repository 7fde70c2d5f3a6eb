// Rows that were sampled from a list of tokens each: the logits of those, gathered, are rows of lengths of their own.
#pragma once

#include "../params.h"

namespace dapo {

// Ids of the tokens that rows kept, side by side: those of row r are [starts[r], starts[r + 1]).
struct KeptIds {
  const int64_t* ids;
  const int64_t* starts;
};

// Copies the kept logits of live rows to `kept`, in the same order, and to places[r] where the row's target is among
// them. The answer is false when some live row keeps an id that is no column, or not its target, or has a temperature
// that is not a positive normal number. With `partial`, where the lists are those of longer rows, the first two are no
// fault: what is in another part is -inf here, and a place may be -1.
bool gather_kept(const Rows& logits, const TokenInputs& tokens, const KeptIds& list, bool partial, const Rows& kept,
                 int64_t* places, int threads);

// Copies `kept` of live rows back to where it came from.
void scatter_kept(const Rows& kept, const TokenInputs& tokens, const KeptIds& list, const Rows& out, int threads);

// Where the first id stands that a live row has listed before, or -1. Ids beyond 31 bits are passed over.
int64_t find_repeated(const KeptIds& list, const uint8_t* live, int64_t n_rows, int threads);

}  // namespace dapo
