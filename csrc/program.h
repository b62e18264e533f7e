// A decoder recorded as a list of kernel calls over fixed buffers, replayed with one call per step.
//
// Every member of the team walks the same list and does its share of each call; a barrier stands between calls. Nothing is
// allocated during a run. The number of tokens and sequences is an argument: prompts, decodes and mixed batches are one program.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "kernels.h"
#include "state_memory.h"
#include "team.h"

namespace triblade {

struct ProgramShape {
  int max_tokens = 0;
  int max_rows = 0;  // rows of logits kept at a time
  int hidden = 0;
  int intermediate = 0;
  int vocabulary = 0;  // tokens that may be chosen; columns of logits beyond are padding
  int max_inputs = 0;  // widest input of a matrix, padding included
  AttentionShape attention{};  // window is per layer
};

struct RopeTable {
  const float* cos = nullptr;  // [positions, pairs]
  const float* sin = nullptr;
  int pairs = 0;
};

// Ask for huge pages under the whole pages of a piece of memory: fewer look-ups of addresses, and prefetching beyond 4 KiB.
void advise_huge_pages(void* start, int64_t bytes);

// Memory in one piece, aligned, with huge pages where the system has them.
class Arena {
 public:
  explicit Arena(int64_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  uint8_t* data() const { return data_; }
  int64_t size() const { return bytes_; }

 private:
  int64_t bytes_;
  uint8_t* data_;
};

class Program {
 public:
  // Programs of one engine (a model and its draft) share a team; they run one after the other.
  Program(const Kernels& kernels, std::shared_ptr<Team> team, const ProgramShape& shape);

  // Recording, in the order of execution.
  void embed(const Matrix& table, float scale);
  // x = matrix [x; final state of the token before; its inner states, each normed by one row of norms [inner, hidden]]; see `draft`.
  void fuse(const Matrix& matrix, const float* norms, int inner, float eps);
  void norm(const float* weight, float eps, const Matrix& next);                  // x -> inputs of `next`
  void qkv(const Matrix& matrix);                                                 // inputs -> q, k, v
  void attention(const LayerCache& cache, int window, const RopeTable& rope, const float* qk_norm, float eps, const Matrix& next);
  void project(const Matrix& matrix, const float* post_norm, float eps);          // x += inputs W^T, normed first if asked
  void gate_up(const Matrix& matrix, Epilogue activation, const Matrix& next);    // inputs -> act(gate) * up -> inputs of `next`
  void end_layer() { ends_.push_back(calls_.size()); }
  void head(const float* weight, float eps, const Matrix& matrix, float softcap);

  // What some layers leave behind them is kept for `states`. To be called when everything is recorded; not for the last layer.
  void keep(const std::vector<int>& layers);

  // Replay: hidden states of a step, kept until the next one; then of any of its rows the token with the largest logit, or -1 if one
  // is not finite. The logits themselves [R, rows of the head] are kept where `out` is given, at most max_rows at a time. With
  // choices [R], which need the logits, it is the token that each of them chooses; barred logits are overwritten.
  void run(const int32_t* ids, const Sequences& sequences);
  void score(const int32_t* rows, int count, float* out, int32_t* best, const Choice* choices = nullptr);

  // States [R, (1 + kept) hidden] of rows of the last run: normed as the head sees them, then those of the layers that are kept.
  void states(const int32_t* rows, int count, float* out);

  // Keep the states of the last run that stand in rows from first_row on, of tokens [start, stop) of a request.
  struct Computed {
    int64_t request, first_row, start, stop;
  };
  void remember(StateMemory& memory, const Computed& computed);

  // A head that guesses from states: run the sequences' tokens, taking the states of the tokens before them out of the memory; then
  // each sequence guesses, from its own state and the token it guessed before, until it has what it asked for, a state is not finite,
  // or the chance (by the head's own softmax) that all its guesses are right falls below the least. Out [S, width], -1 from there on.
  // Blocks for the guesses' keys exist.
  struct DraftOptions {
    const int32_t* lengths;  // [S] most guesses
    const int32_t* tokens;   // [rows of the head] what each row stands for
    int width;
    float least_chance;      // 0: whatever the chance
  };
  void draft(const int32_t* ids, StateMemory& memory, const int64_t* requests, const Sequences& sequences, const DraftOptions& options,
             int32_t* out);

  int64_t buffer_bytes() const { return arena_->size() + (kept_ ? kept_->size() : 0) + (fused_ ? fused_->size() : 0); }

 private:
  using Call = std::function<void(int member)>;

  Share tokens(int member) const { return share(tokens_, 1, member, team_->size()); }
  void record_linear(const Matrix& matrix, Epilogue epilogue, float* out, int stride);
  void place_tokens();
  void plan_attention();
  AttentionOutput pieces() const;
  void attend_all(int layer, const LayerCache& cache, const AttentionShape& shape, int member);
  void head_share(const Matrix& matrix, float softcap, int member);
  void look_at(float* logits, int count, int first, int row, Best& best);
  int draw_pieces() const;  // of the vocabulary
  double weigh_piece(int row, int piece, float* out) const;
  void weigh_share(int member);
  int32_t drawn(int row) const;
  void score_rows(const int32_t* rows, int count, float* out);
  Best best_of(int row) const;  // of all members
  static void walk(void* context, int member);

  const Kernels& kernels_;
  const ProgramShape shape_;
  const std::shared_ptr<Team> team_;
  std::unique_ptr<Arena> arena_, kept_, fused_;  // kept [layers, T, hidden]; fused [T, (2 + inner) hidden] and what is given [T, (1 + inner) hidden]
  std::vector<Call> calls_, head_calls_, draw_calls_;
  const std::vector<Call>* walked_ = nullptr;

  float *x_, *qkv_, *attended_, *hidden_, *projected_, *partial_, *states_, *some_logits_;
  Activations activations_;
  const float* norm_weight_ = nullptr;  // of the head
  float norm_eps_ = 0;
  const float* before_ = nullptr;  // states that `fuse` reads, [T, (1 + inner) hidden], or [T, hidden] where they are its own
  bool before_is_own_ = false;
  float* given_ = nullptr;
  float* own_states_;  // [R, hidden]
  int kept_layers_ = 0;
  std::vector<size_t> ends_;  // of the layers in `calls_`
  uint8_t* scratch_;
  int64_t scratch_bytes_;

  int tokens_ = 0;
  const int32_t* ids_ = nullptr;
  Sequences sequences_;
  int32_t *positions_, *slots_;  // [T]
  int block_size_ = 0;
  std::vector<AttentionItem> items_;
  int pieces_ = 1;        // of the longest sequence
  bool is_split_ = false;  // pieces of a sequence are items of their own
  std::unique_ptr<std::atomic<int>[]> next_item_;  // per layer
  int layers_ = 0;

  std::vector<int32_t> own_rows_;  // of `remember`

  const int32_t* rows_ = nullptr;
  int row_count_ = 0;
  float* logits_ = nullptr;  // null: not kept
  int64_t best_rows_;
  std::vector<Best> best_;  // [members, best_rows_]
  bool wants_chances_ = false;
  const Choice* choices_ = nullptr;   // null: the largest of every row
  int64_t stride_ = 0;                // between rows of `logits_`
  std::vector<float> tops_;           // [R], of rows that draw; none elsewhere
  std::vector<uint64_t> weights_;     // [R, pieces of the vocabulary], of rows that draw
};

}  // namespace triblade
