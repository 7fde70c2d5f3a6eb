// The threads of one cluster on one thread of the host: csrc/cuda/cluster_row.h's Machine for tests.
//
// Each has a stack of its own and runs until it has to wait; who goes on then, and when a bulk copy lands, is drawn by
// chance or chosen to be awkward. Where a copy will land lies NaN until then, and it reads its source as late as it may.
// What only hardware would forgive is an error: a copy that is not aligned or overwrites what threads wrote, bytes for a
// block that has left, a barrier that nobody will complete.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../csrc/cuda/cluster_row.h"

namespace dapo {
namespace cuda {

inline SoftmaxPart merge_tree(std::vector<SoftmaxPart> parts, float c) {  // by exchange among lanes, as shuffles do
  float max = -INFINITY;
  for (const SoftmaxPart& part : parts) max = std::fmax(max, part.max);
  for (SoftmaxPart& part : parts) part = lift(part, max, c);
  for (size_t lanes = parts.size() / 2; lanes > 0; lanes /= 2) {
    const std::vector<SoftmaxPart> others = parts;
    for (size_t i = 0; i < parts.size(); ++i) {
      parts[i].sum += others[i ^ lanes].sum;
      parts[i].weighted += others[i ^ lanes].weighted;
    }
  }
  return parts[0];
}

// Who goes first where several could.
enum class Order { chance, first, last, late };  // late: nothing lands while a thread can run

class HostCluster {
 public:
  // Runs body(rank) in every thread of every block; `words` of shared memory in each block.
  HostCluster(int n_blocks, size_t n_words, int cluster, int n_clusters, unsigned seed)
      : cluster(cluster), n_clusters(n_clusters), chance_(seed), order_(static_cast<Order>(seed % 4)),
        warps_(n_blocks * kWarps) {
    for (int k = 0; k < n_blocks; ++k) blocks_.push_back(std::make_unique<Block>(n_words));
  }

  void run(const std::function<void(int)>& body) {
    running_ = this;
    body_ = &body;
    const int n = static_cast<int>(blocks_.size()) * kThreads;
    threads_.resize(n);
    while (static_cast<int>(stacks().size()) < n) stacks().emplace_back(new char[kStack]);
    for (int i = 0; i < n; ++i) {
      threads_[i].index = i;
      runnable_.push_back(i);
    }
    for (;;) {
      const size_t under_way = copies_.size() + messages_.size();
      if (under_way == 0 && runnable_.empty()) break;
      if (runnable_.empty() || (under_way > 0 && order_ != Order::late && chance_() % 64 == 0)) {
        const size_t which = chance_() % under_way;
        which < copies_.size() ? land(which) : deliver(which - copies_.size());
      } else {
        resume(take());
      }
      if (failure_) std::rethrow_exception(failure_);
    }
    if (n_done_ != n) throw std::logic_error(std::to_string(n - n_done_) + " threads wait for ever");
  }

  Word* words(int rank) { return blocks_[rank]->words.data(); }
  ClusterShared& shared(int rank) { return blocks_[rank]->shared; }

  // What a thread asks for. Static, as the hardware's are: of the thread that runs.
  struct Machine {
    static int thread() { return me().index % kThreads; }
    static int rank() { return me().index / kThreads; }
    static int cluster() { return running_->cluster; }
    static int clusters() { return running_->n_clusters; }

    static void block_sync() { running_->meet(block().sync, kThreads); }
    static void cluster_sync() { running_->meet(running_->all_, static_cast<int>(running_->threads_.size())); }

    template <int kWidth> static SoftmaxPart merge(SoftmaxPart part, float c) {
      return running_->exchange(part, kWidth, c);
    }

    static void init_barrier(uint64_t* barrier) { block().barriers[barrier] = Barrier(); }
    static void publish_barriers() {}
    static void arrive_expecting(uint64_t* barrier, int bytes) {
      Barrier& b = block().barriers.at(barrier);
      if (b.arrived) throw std::logic_error("a second arrival in one phase of a barrier");
      b.arrived = true;
      b.missing += bytes;
      running_->settle(b);
    }
    static void wait(uint64_t* barrier, int parity) {
      Barrier& b = block().barriers.at(barrier);
      if (b.phase % 2 == parity) running_->sleep(b.waiting);
    }

    static void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
      Block& b = block();
      const size_t first = static_cast<Word*>(to) - b.words.data(), n = bytes / kWord;
      const auto odd = (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % kWord;
      if (odd != 0) throw std::logic_error("a bulk copy that is not aligned to 16 bytes");
      if (first + n > b.words.size()) throw std::logic_error("a bulk copy beyond shared memory");
      if (std::memcmp(&b.words[first], &b.copied[first], bytes) != 0) {  // it would take a fence
        throw std::logic_error("a bulk copy over what threads wrote");
      }
      std::memset(&b.words[first], 0xff, bytes);
      running_->copies_.push_back({&b, first, n, from, barrier});
    }

    static void send(SlicePart* place, int rank, const SlicePart& value, uint64_t* barrier) {
      Block &mine = block(), &other = *running_->blocks_[rank];
      SlicePart* const there = &other.shared.slice_parts[0][0] + (place - &mine.shared.slice_parts[0][0]);
      running_->messages_.push_back({&other, there, value, other.shared.met + (barrier - mine.shared.met)});
    }
    static void wait_for_cluster(uint64_t* barrier, int parity) { wait(barrier, parity); }
  };

  const int cluster, n_clusters;

 private:
  static constexpr size_t kStack = 64 * 1024;

  struct Meeting {
    int n = 0;
    std::vector<int> waiting;
  };
  struct Barrier {
    int phase = 0;
    bool arrived = false;
    int64_t missing = 0;  // bytes
    std::vector<int> waiting;
  };
  struct Block {
    explicit Block(size_t n_words) : words(n_words, Word{{~0u, ~0u, ~0u, ~0u}}), copied(words) {}
    std::vector<Word> words, copied;  // what threads see; what copies brought
    ClusterShared shared;
    std::map<uint64_t*, Barrier> barriers;
    Meeting sync;
    int n_done = 0;
  };
  struct Warp {
    Meeting sync;
    SoftmaxPart in[kWarp], out;
  };
  struct Copy {
    Block* block;
    size_t first, n;
    const void* from;
    uint64_t* barrier;
  };
  struct Message {
    Block* block;
    SlicePart* place;
    SlicePart value;
    uint64_t* barrier;
  };
  struct Thread {
    int index = 0;
    bool begun = false;
    jmp_buf at;
    ucontext_t start;
  };

  static std::vector<std::unique_ptr<char[]>>& stacks() {
    static std::vector<std::unique_ptr<char[]>> all;
    return all;
  }
  static Thread& me() { return running_->threads_[running_->current_]; }
  static Block& block() { return *running_->blocks_[Machine::rank()]; }

  int take() {
    auto next = runnable_.begin() + static_cast<std::ptrdiff_t>(chance_() % runnable_.size());
    if (order_ == Order::first) next = std::min_element(runnable_.begin(), runnable_.end());
    if (order_ == Order::last) next = std::max_element(runnable_.begin(), runnable_.end());
    std::iter_swap(next, std::prev(runnable_.end()));
    const int thread = runnable_.back();
    runnable_.pop_back();
    return thread;
  }

  // setjmp rather than swapcontext, which asks the kernel each time.
  void resume(int thread) {
    current_ = thread;
    Thread& t = threads_[thread];
    if (_setjmp(scheduler_) != 0) return;
    if (t.begun) _longjmp(t.at, 1);
    t.begun = true;
    getcontext(&t.start);
    t.start.uc_stack = {};
    t.start.uc_stack.ss_sp = stacks()[thread].get();
    t.start.uc_stack.ss_size = kStack;
    t.start.uc_link = nullptr;
    makecontext(&t.start, &HostCluster::begin, 0);
    setcontext(&t.start);
  }
  static void begin() {
    HostCluster& self = *running_;
    try {
      (*self.body_)(Machine::rank());
    } catch (...) {
      self.failure_ = std::current_exception();
    }
    ++self.n_done_;
    ++block().n_done;
    _longjmp(self.scheduler_, 1);
  }
  void sleep(std::vector<int>& waiting) {
    waiting.push_back(current_);
    if (_setjmp(me().at) == 0) _longjmp(scheduler_, 1);
  }
  void wake(std::vector<int>& waiting) {
    runnable_.insert(runnable_.end(), waiting.begin(), waiting.end());
    waiting.clear();
  }
  // Whoever comes last may be the first to go on.
  void meet(Meeting& meeting, int n) {
    if (++meeting.n == n) {
      meeting.n = 0;
      wake(meeting.waiting);
      runnable_.push_back(current_);
      if (_setjmp(me().at) == 0) _longjmp(scheduler_, 1);
    } else {
      sleep(meeting.waiting);
    }
  }
  SoftmaxPart exchange(const SoftmaxPart& part, int width, float c) {
    Warp& warp = warps_[current_ / kWarp];
    warp.in[current_ % kWarp] = part;
    if (warp.sync.n == kWarp - 1) warp.out = merge_tree({warp.in, warp.in + width}, c);
    meet(warp.sync, kWarp);
    return warp.out;
  }
  void settle(Barrier& b) {
    if (!b.arrived || b.missing != 0) return;
    b.arrived = false;
    ++b.phase;
    wake(b.waiting);
  }
  void land(size_t which) {
    const Copy c = copies_[which];
    copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(which));
    std::memcpy(&c.block->words[c.first], c.from, c.n * kWord);
    std::memcpy(&c.block->copied[c.first], c.from, c.n * kWord);
    count(*c.block, c.barrier, c.n * kWord);
  }
  void deliver(size_t which) {
    const Message m = messages_[which];
    messages_.erase(messages_.begin() + static_cast<std::ptrdiff_t>(which));
    *m.place = m.value;
    count(*m.block, m.barrier, sizeof(SlicePart));
  }
  void count(Block& block, uint64_t* barrier, size_t bytes) {
    if (block.n_done > 0) throw std::logic_error("bytes arrive in a block that has left");
    Barrier& b = block.barriers.at(barrier);
    b.missing -= static_cast<int64_t>(bytes);
    settle(b);
  }

  inline static HostCluster* running_ = nullptr;
  std::mt19937 chance_;
  const Order order_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Warp> warps_;
  std::vector<Thread> threads_;
  std::vector<int> runnable_;
  std::vector<Copy> copies_;
  std::vector<Message> messages_;
  Meeting all_;
  const std::function<void(int)>* body_ = nullptr;
  std::exception_ptr failure_;
  jmp_buf scheduler_;
  int current_ = 0, n_done_ = 0;
};

}  // namespace cuda
}  // namespace dapo
