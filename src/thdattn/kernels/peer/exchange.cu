// All-gather and all-to-all over peer memory. One kernel writes, waits for and reads what ranks exchange, for calls
// that overlap no compute. It starts no copy engine, and waits for no flag between launches, each of which costs 10 us.
//
// A payload is what travels. It has `count` chunks for every pair of ranks: at least one, and the same number on all
// ranks. A warp writes a chunk to where other ranks read it (`offer`), or copies a chunk of one rank, also of its own,
// to its place (`place`). Chunks are written to the reader's memory unless they are read again later. A GPU writes to
// another one's memory without waiting for answers, but does wait when it reads there.
//
// A rank may write to another one's memory once all ranks have said that they took what was there before. It does not
// wait for the owner of the memory alone. Each rank says so when it reads nothing more of that turn from any memory.

#pragma once

#include "kernels.cu"

// Flags of one rank in the memory of another. A flag is 1, or 0 after somebody waited for it. ready, taken: see
// comm/peer/windows.py. offered: one for each of its chunks.
struct RankFlags { u32 ready[16], taken[16], offered[kChunks]; };
CHECK_RankFlags;

// Where this rank exchanges with the others. theirs: this rank's flags in the memory of each rank. mine: the flags of
// all ranks in its own. counts: thread blocks that may offer, and those that are done; 0 between calls. takes: whether
// this rank reads nothing of what was offered after this kernel.
struct PeerExchange { RankFlags *theirs[kMaxRanks], *mine; u32* counts; int rank, num_ranks, takes; };
CHECK_PeerExchange;

__device__ __forceinline__ void put(u32* flag, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ void wait_for(const u32* flag) {
  u32 found;
  do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory"); while (found != 1);
}

// Tests whether all `of` callers have come here with this call. One thread of each calls it, after its work.
__device__ __forceinline__ bool is_last(u32* count, int of) {
  __threadfence();
  if (atomicAdd(count, 1) != of - 1) return false;
  *count = 0;
  __threadfence();
  return true;
}

// ------------------------------------------------------------------------------------------------ keys of all ranks

// Keys and values of all ranks. `from` has one part for every other rank, as in thd_reorder<false>. This rank offers
// its num_rows rows (at least one) at `own`, with all `pitch` words of each. `to` has a destination for each rank, or
// one for all ranks; the others are null. rank_order (num_ranks * num_rows).
struct AllGather {
  Rows keys, values;
  uint4* to[2][kMaxRanks];                                             // of keys, of values
  const int* rank_order;
  const int2* query_ranges;
  int num_rows;

  // A chunk is `each` consecutive rows.
  __device__ __forceinline__ int each() const { return (num_rows + kChunks - 1) / kChunks; }
  __device__ __forceinline__ int count() const { return (num_rows + each() - 1) / each(); }
  __device__ __forceinline__ int begin(int chunk) const { return chunk * each(); }
  __device__ __forceinline__ int end(int chunk) const { return min(num_rows, (chunk + 1) * each()); }

  __device__ __forceinline__ void offer(const PeerExchange& exchange, int chunk) const {
    for (int next = 1; next <= exchange.num_ranks; ++next) {            // each rank begins with another one
      const int rank = (exchange.rank + next) % exchange.num_ranks;
      if (!to[0][rank]) continue;
      for (size_t row = begin(chunk); row < end(chunk); ++row) {
        move_row(to[0][rank] + row * keys.pitch, keys.own + row * keys.own_pitch, keys.pitch, false);
        move_row(to[1][rank] + row * values.pitch, values.own + row * values.own_pitch, values.pitch, false);
      }
    }
  }

  // Copies the first `words` of each row to its place in sequence order.
  __device__ __forceinline__ void place(const PeerExchange& exchange, int rank, int chunk) const {
    const bool own = rank == exchange.rank;
    const uint4 *const k = own ? keys.own : keys.from[rank], *const v = own ? values.own : values.from[rank];
    const int k_pitch = own ? keys.own_pitch : keys.pitch, v_pitch = own ? values.own_pitch : values.pitch;
    for (size_t row = begin(chunk); row < end(chunk); ++row) {
      const int to = rank_order[rank * num_rows + row];
      if (to < 0) continue;
      const bool zero = is_empty(query_ranges[to]);
      move_row(keys.out + (size_t)to * keys.words, k + row * k_pitch, keys.words, zero);
      move_row(values.out + (size_t)to * values.words, v + row * v_pitch, values.words, zero);
    }
  }
};
CHECK_AllGather;

// ------------------------------------------------------------------------------------------------ slices for each rank

constexpr int kMaxSlices = 6;
CHECK_kMaxSlices;
constexpr u32 kLine = 128;                                             // bytes; chunks begin at multiples of it

// What an array has for each rank, or gets from each: `rows` times words[rank] words, with `pitch` words from one row
// to the next.
template <typename Word> struct SliceSpec {
  Word* of[kMaxRanks];
  int words[kMaxRanks], rows, pitch;

  __device__ __forceinline__ u32 size(int rank) const { return (u32)rows * words[rank]; }
};
CHECK_SliceSpec;

// Addresses of the words of a slice for one rank, by number. A slice has at least one and fewer than 2^31 words. A
// multiplication replaces the division: it rounds down by at most one.
template <typename Word> struct Words {
  Word* begin;
  u32 words, inverse;
  size_t pitch;
  __device__ __forceinline__ Words(const SliceSpec<Word>& slice, int rank)
      : begin(slice.of[rank]), words(slice.words[rank]), inverse(0xffffffffu / words), pitch(slice.pitch) {}
  __device__ __forceinline__ Word* operator()(u32 i) const {
    const u32 guess = __umulhi(i, inverse), rest = i - guess * words;
    const bool next = rest >= words;
    return begin + (guess + next) * pitch + (next ? rest - words : rest);
  }
};

// Copies the words [begin, end) with a warp, four per lane at a time. Two functions return the addresses.
template <typename Word, typename From, typename To>
__device__ __forceinline__ void move_words(u32 begin, u32 end, From from, To to) {
  for (u32 i = begin + threadIdx.x % kWarp; i < end; i += 4 * kWarp) {
    Word x[4];
    #pragma unroll
    for (int n = 0; n < 4; ++n) {
      const Word* const at = from(i + n * kWarp);
      if (i + n * kWarp < end) x[n] = *at;
    }
    #pragma unroll
    for (int n = 0; n < 4; ++n) {
      Word* const at = to(i + n * kWarp);
      if (i + n * kWarp < end) *at = x[n];
    }
  }
}

// Every rank's slices of some arrays, and where the slices of all ranks go. A message is what one rank has for another:
// its slices of all arrays, one after another. This rank's message to each rank begins at `to`, in that rank's memory.
// The message from each rank begins at `from`, in this rank's memory. What a rank has for itself is copied to its place
// at once.
//
// Words may be narrower on one of two ranks, as chunks have the same bytes.
template <typename Word> struct AllToAll {
  SliceSpec<Word> out[kMaxSlices], in[kMaxSlices];
  Word *to[kMaxRanks], *from[kMaxRanks];
  int num_slices, num_chunks;

  __device__ __forceinline__ int count() const { return num_chunks; }

  // Calls move(c, first, last, begin) for each array of which the chunk of a message has words. c is the array, [first,
  // last) are the words of its slice, and `begin` is the word of the message where the slice begins.
  template <typename Move>
  __device__ __forceinline__ void each(const SliceSpec<Word>* slices, int rank, int chunk, Move move) const {
    u32 total = 0;
    for (int c = 0; c < num_slices; ++c) total += slices[c].size(rank);
    constexpr u32 kWords = kLine / sizeof(Word);
    const u32 each = ((total + kWords - 1) / kWords + num_chunks - 1) / num_chunks * kWords;
    const u32 first = min(chunk * each, total), last = min(first + each, total);
    u32 begin = 0;
    for (int c = 0; c < num_slices; ++c) {
      const u32 end = begin + slices[c].size(rank), from_here = max(first, begin), to_here = min(last, end);
      if (from_here < to_here) move(c, from_here - begin, to_here - begin, begin);
      begin = end;
    }
  }

  __device__ __forceinline__ void offer(const PeerExchange& exchange, int chunk) const {
    for (int next = 1; next < exchange.num_ranks; ++next) {
      const int rank = (exchange.rank + next) % exchange.num_ranks;
      each(out, rank, chunk, [&](int c, u32 first, u32 last, u32 begin) {
        Word* const message = to[rank] + begin;
        move_words<Word>(first, last, Words<Word>(out[c], rank), [=](u32 i) { return message + i; });
      });
    }
  }

  __device__ __forceinline__ void place(const PeerExchange& exchange, int rank, int chunk) const {
    each(in, rank, chunk, [&](int c, u32 first, u32 last, u32 begin) {
      const Words<Word> places(in[c], rank);
      Word* const message = from[rank] + begin;
      if (rank == exchange.rank) move_words<Word>(first, last, Words<Word>(out[c], rank), places);
      else move_words<Word>(first, last, [=](u32 i) { return message + i; }, places);
    });
  }
};
CHECK_AllToAll;

// ------------------------------------------------------------------------------------------------ the kernel

// Offers this rank's chunks.
template <typename Payload>
__device__ __forceinline__ void offer_all(const Payload& payload, const PeerExchange& exchange, int count, int warp,
                                          int warps) {
  const int lane = threadIdx.x % kWarp, per_block = blockDim.x / kWarp;
  if (warp / per_block * per_block >= count) return;                   // no warp of this block has a chunk
  if (threadIdx.x < exchange.num_ranks) wait_for(exchange.mine[threadIdx.x].taken);
  __syncthreads();
  // Nobody says again that it has taken everything before all chunks were offered. The first warp of every block that
  // is counted has a chunk.
  if (threadIdx.x == 0 && is_last(&exchange.counts[0], (min(warps, count) + per_block - 1) / per_block))
    for (int rank = 0; rank < exchange.num_ranks; ++rank) exchange.mine[rank].taken[0] = 0;
  for (int chunk = warp; chunk < count; chunk += warps) {
    payload.offer(exchange, chunk);
    __syncwarp();                                                      // the flag comes after what all lanes wrote
    if (lane < exchange.num_ranks && lane != exchange.rank) put(&exchange.theirs[lane]->offered[chunk], 1);
  }
}

// Copies the chunks of all ranks to their places. A warp begins with its own rank's chunks, while others arrive, and
// then takes those as they are offered.
template <typename Payload>
__device__ __forceinline__ void collect_all(const Payload& payload, const PeerExchange& exchange, int count, int warp,
                                            int warps) {
  for (int chunk = warp; chunk < count; chunk += warps) payload.place(exchange, exchange.rank, chunk);
  for (int chunk = warp; chunk < count; chunk += warps)
    for (int next = 1; next < exchange.num_ranks; ++next) {             // each rank begins with another one
      const int rank = (exchange.rank + next) % exchange.num_ranks;
      if (threadIdx.x % kWarp == 0) {
        wait_for(&exchange.mine[rank].offered[chunk]);
        exchange.mine[rank].offered[chunk] = 0;
      }
      __syncwarp();                                                    // all lanes read after the flag
      payload.place(exchange, rank, chunk);
    }
}

// Exchanges a payload. All ranks call it with payloads of one kind. Blocks with even numbers offer, and those with odd
// numbers collect. A block waits only for blocks of other ranks with smaller numbers, so all finish if blocks start in
// the order of their numbers. Bound by the links.
//
// marks: two numbers of the watchdog, written at the beginning and at the end; null if there is no watchdog
// Launch: grid (any even number, the same on all ranks), block 512.
template <typename Payload>
__global__ void __launch_bounds__(512, 2) thd_peer_exchange(
    const __grid_constant__ Payload payload, const __grid_constant__ PeerExchange exchange, u32* marks, u32 number) {
  const int warp = (blockIdx.x / 2 * blockDim.x + threadIdx.x) / kWarp, warps = gridDim.x / 2 * (blockDim.x / kWarp);
  const int count = payload.count();
  if (blockIdx.x % 2 == 0) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && marks) put(marks, number);
    offer_all(payload, exchange, count, warp, warps);
  } else {
    collect_all(payload, exchange, count, warp, warps);
  }
  __syncthreads();
  if (!__syncthreads_or(threadIdx.x == 0 && is_last(&exchange.counts[1], gridDim.x))) return;
  if (threadIdx.x < exchange.num_ranks && exchange.takes) put(exchange.theirs[threadIdx.x]->taken, 1);
  if (threadIdx.x == 0 && marks) put(marks + 1, number);
}
