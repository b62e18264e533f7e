// Eight numbers of the type of activations in four words.

constexpr bool F16 = FLOAT16;

DEVICE void unpack8(const u32x4& words, float (&x)[8]) {
  x[0] = low<F16>(words.x), x[1] = high<F16>(words.x), x[2] = low<F16>(words.y), x[3] = high<F16>(words.y);
  x[4] = low<F16>(words.z), x[5] = high<F16>(words.z), x[6] = low<F16>(words.w), x[7] = high<F16>(words.w);
}

DEVICE u32x4 pack8(const float (&x)[8]) {
  return u32x4{pack<F16>(x[0], x[1]), pack<F16>(x[2], x[3]), pack<F16>(x[4], x[5]), pack<F16>(x[6], x[7])};
}

