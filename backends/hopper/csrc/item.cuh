// The unit of work, and what takes it.
#pragma once

namespace hopper {

// The unit of work: a tile of query rows and the tiles of keys [first, last) that it attends to.
//
// A row is one query head of one token: the heads that share a kv head are neighbours, so keys are read once for all of them. A tile
// holds whole tokens; rows that are left over idle.
struct Item {
  int token_start;  // packed token of the sequence's first query
  int query_len;
  int kv_len;
  int seq;      // row of the block table
  int tile;         // its tokens: tile * Arguments::tokens and on
  int first;    // tiles of keys
  int last;
  int splits;   // programs that share the rows; 1: nobody does
  int split;    // which of them this is
  int partial;  // number of the first split's partial result, of one kv head
  int ticket;   // number of the counter that those programs share, of one kv head
  int head;     // the kv head, filled in when an item is shown; negative where there is no item any more
};
constexpr int ITEM_INTS = sizeof(Item) / 4;

}  // namespace hopper
