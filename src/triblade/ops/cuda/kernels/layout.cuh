// How the inputs of products lie in memory, as `ops/cuda/linear.py` says it in one number: 0 is row after row, NT tiles of 8 tokens
// with or without WIDE the orders in which `linear.cu` and `wide.cu` take them. Tokens come in slabs of 8 NT, padded to whole ones (what
// lies there is nobody's); of a slab, inputs come in chunks of 64. Input 32 h + 8 t + 4 s + 2 p + e of a chunk, of token 8 n + g:
//
//   NT         [n][h][g][t][s][p][e]: 16 bytes are what lane 4 g + t of a warp has of a half, in the order of its registers
//   NT | WIDE  [h][s][p][n][g][t][e]: 8 tokens by 16 bytes are a matrix of the warpgroup instruction's second operand

#define WIDE 256

// Where a pair of numbers lies, in words, in a matrix of `pairs` per token: the sum of what its place in the token and its token add.
DEVICE u32 pair_place(int pair, int layout) {
  if (!layout) return pair;
  const int tiles = layout & (WIDE - 1), h = pair >> 4 & 1, t = pair >> 2 & 3, sp = pair & 3;
  return (pair >> 5) * 256 * tiles + (layout & WIDE ? (h * 4 + sp) * tiles * 32 + t : h * 128 + t * 4 + sp);
}
DEVICE u64 token_in_slab(int in_slab, int pairs, int layout) {
  const int n = in_slab >> 3, g = in_slab & 7;
  return !layout ? (u64)in_slab * pairs : layout & WIDE ? n * 32 + g * 4 : n * 256 + g * 16;
}
DEVICE u64 pair_at(int token, int pair, int pairs, int layout) {
  const int slab_tokens = layout ? 8 * (layout & (WIDE - 1)) : 1, slab = token / slab_tokens;
  return (u64)slab * pairs * slab_tokens + token_in_slab(token % slab_tokens, pairs, layout) + pair_place(pair, layout);
}

// Eight numbers in a row (a unit) of a token.
DEVICE void store_unit(void* out, int token, int unit, int units, int layout, const u32x4& v) {
  u32* at = static_cast<u32*>(out) + pair_at(token, unit * 4, units * 4, layout);
  if (layout & WIDE) {
    const int apart = (layout & (WIDE - 1)) * 32;
    at[0] = v.x, at[apart] = v.y, at[2 * apart] = v.z, at[3 * apart] = v.w;
  } else {
    *reinterpret_cast<u32x4*>(at) = v;
  }
}

// Four numbers in a row; `quarter` counts them.
DEVICE void store_half_unit(void* out, int token, int quarter, int quarters, int layout, const u32x2& v) {
  u32* at = static_cast<u32*>(out) + pair_at(token, quarter * 2, quarters * 2, layout);
  if (layout & WIDE) at[0] = v.x, at[(layout & (WIDE - 1)) * 32] = v.y;
  else *reinterpret_cast<u32x2*>(at) = v;
}
