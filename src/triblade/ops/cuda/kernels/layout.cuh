// Layouts that several kernels share.

// Where 8 numbers in a row (a unit) of a token lie, in units, in a matrix of `units` per token: row after row, or (token_tiles > 0) in
// the order in which `linear.cu` takes them: slabs of token_tiles * 8 tokens, of which each chunk of 64 inputs is [token_tiles, 2, 32
// lanes]; lane 4 g + t has token g and unit t of a half. Tokens are padded to whole slabs; what lies there is nobody's.
DEVICE u64 unit_at(int token, int unit, int units, int token_tiles) {
  if (!token_tiles) return (u64)token * units + unit;
  const int slab = token / (8 * token_tiles), in_slab = token % (8 * token_tiles);
  const int tile = (unit >> 3) * token_tiles + (in_slab >> 3);
  return (u64)slab * units * 8 * token_tiles + (tile * 2 + (unit >> 2 & 1)) * 32 + (in_slab & 7) * 4 + (unit & 3);
}
