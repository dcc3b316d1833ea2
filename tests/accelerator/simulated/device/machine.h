// Streams, events and schedules. A stream is a queue; work runs on the thread that enqueues or waits, never on one of its own.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "clocks.h"

namespace sim {

constexpr int DEVICES = 2;
constexpr size_t HOST = 0;  // the actor of all threads of the host

using Key = std::pair<int, int64_t>;  // device, stream

struct Event {
  std::vector<Key> where;     // of each record, in order
  std::vector<Clock> clocks;  // what each record comes after
  size_t done = 0;            // records that were reached
};
using EventPtr = std::shared_ptr<Event>;

struct Op {
  std::function<void()> run;
  EventPtr wait, mark;
  size_t version = 0;
};

// What work touches. Addresses alone: work that is queued keeps no tensor alive.
struct Touched {
  std::string what;
  std::vector<Range> reads, writes;
};

enum Mode { EAGER, ONLY, OTHERS, CHAOS };

struct Counts {
  int64_t launches = 0;       // kernels and copies on the device
  int64_t read_bytes = 0;     // by kernels, copies not counted
  int64_t copies_down = 0, bytes_down = 0, copies_up = 0, bytes_up = 0;
  int64_t unpinned = 0;       // copies that were to be asynchronous and could not be
};

class Machine {
 public:
  std::mutex lock;
  Counts counts;
  std::map<std::thread::id, int64_t> launches, forced;  // of each thread; forced: its waits that moved a held stream
  std::string error;
  int64_t fail_launch = -1;  // so many launches on, one fails asynchronously
  bool checks_races = false;
  Shadow shadow;

  // --- work; the lock is held ------------------------------------------------------------------------------------
  void put(Key k, Op op) {
    queues_[k].push_back(std::move(op));
    pump();
  }

  void launch(Key k, const Touched& touched, std::function<void()> run) {
    ++counts.launches;
    ++launches[std::this_thread::get_id()];
    bool fails = fail_launch == 0;
    if (fail_launch >= 0) --fail_launch;
    if (fails) run = [] { throw std::runtime_error("this kernel fails, as asked for"); };
    order(k, touched);
    put(k, {std::move(run), nullptr, nullptr});
  }

  void poison(Key k, Range range, std::function<void()> run) {  // memory that was freed
    order(k, {"freeing", {}, {range}});
    put(k, {std::move(run), nullptr, nullptr});
  }

  size_t record(const EventPtr& e, Key k) {
    e->where.push_back(k);
    e->clocks.push_back(advanced(k));
    size_t version = e->where.size();
    put(k, {nullptr, nullptr, e, version});
    return version;
  }

  void block(const EventPtr& e, Key k) {
    if (e->where.empty()) return;
    advanced(k).join(e->clocks.back());
    put(k, {nullptr, e, nullptr, e->where.size()});
  }

  bool reached(const EventPtr& e) {  // as the host sees it
    pump();
    bool done = e->done >= e->where.size();
    if (done && !e->clocks.empty()) host_.join(e->clocks.back());
    return done;
  }

  bool idle(Key k) {
    pump();
    bool done = queues_[k].empty();
    if (done) host_.join(clocks_[k]);
    return done;
  }

  void wait(std::unique_lock<std::mutex>& l, const EventPtr& e, size_t version) {  // the host waits
    auto done = [&] { return e->done >= version; };
    if (mode_ != CHAOS) pump();
    if (!done() && std::this_thread::get_id() != holder_) {  // the holder's work goes on meanwhile
      if (patience_ms_ < 0)
        freed_.wait(l, done);
      else
        freed_.wait_for(l, std::chrono::milliseconds(patience_ms_), done);
    }
    while (mode_ == CHAOS && !done()) {
      if (roll(1)) continue;
      if (!still_) break;
      still_.reset();
    }
    if (!done()) {
      ++forced[std::this_thread::get_id()];
      force(e->where[version - 1], done);
      freed_.notify_all();
    }
    host_.join(e->clocks[version - 1]);
    if (!error.empty()) {
      std::string was = std::move(error);
      error.clear();
      throw std::runtime_error("sim: a kernel failed: " + was);
    }
  }

  void sync(std::unique_lock<std::mutex>& l, Key k) {
    auto e = std::make_shared<Event>();
    size_t version = record(e, k);
    wait(l, e, version);
  }

  void host_touches(Range range, bool writes, const std::string& what) {
    host_.tick(HOST);
    if (writes)
      shadow.write(range, HOST, host_, what);
    else
      shadow.read(range, HOST, host_, what);
  }

  // --- schedules -------------------------------------------------------------------------------------------------
  void let(Mode mode, std::set<int64_t> streams, int64_t patience_ms, uint64_t seed) {
    was_ = mode_, were_ = std::move(named_), mode_ = mode, named_ = std::move(streams), patience_ms_ = patience_ms;
    holder_ = mode == EAGER ? std::thread::id() : std::this_thread::get_id();
    dice_.seed(seed);
    still_for_ = 0;
    std::erase_if(queues_, [](auto& one) { return one.second.empty(); });
    pump();
    freed_.notify_all();
  }

  int64_t pending() const {
    int64_t n = 0;
    for (auto& [k, q] : queues_) n += q.size();
    return n;
  }

  int64_t new_stream() { return ++streams_; }
  std::vector<Key> streams_of(int device) const {
    std::vector<Key> found{{device, 0}};
    for (auto& [k, q] : queues_)
      if (k.first == device && k.second) found.push_back(k);
    return found;
  }

 private:
  std::condition_variable freed_;
  std::map<Key, std::deque<Op>> queues_;
  std::map<Key, Clock> clocks_;
  std::map<Key, size_t> actors_;
  Clock host_;
  Mode mode_ = EAGER, was_ = EAGER;
  std::set<int64_t> named_, were_;
  std::thread::id holder_;
  int64_t patience_ms_ = -1, streams_ = 0;
  std::mt19937_64 dice_;
  std::optional<Key> still_;  // under chaos, for so many steps
  uint64_t still_for_ = 0;

  void order(Key k, const Touched& touched) {
    Clock& clock = advanced(k);
    if (!checks_races) return;
    size_t actor = actor_of(k);
    for (Range r : touched.reads) shadow.read(r, actor, clock, touched.what + name(k));
    for (Range r : touched.writes) shadow.write(r, actor, clock, touched.what + name(k));
  }

  size_t actor_of(Key k) { return actors_.try_emplace(k, actors_.size() + 1).first->second; }
  Clock& advanced(Key k) {  // what is queued now comes after the stream's work and after all that the host knows
    Clock& clock = clocks_[k];
    clock.join(host_);
    clock.tick(actor_of(k));
    return clock;
  }
  static std::string name(Key k) { return " (stream " + std::to_string(k.second) + " of device " + std::to_string(k.first) + ")"; }

  static bool in(Key k, Mode mode, const std::set<int64_t>& ids) {
    return mode == ONLY ? ids.count(k.second) : mode == OTHERS && !ids.count(k.second);
  }
  bool held(Key k) const { return in(k, mode_, named_); }
  // Held until lately: such a stream goes one step when all others can go no further.
  bool slow(Key k) const { return in(k, was_, were_); }
  static bool ready(const Op& op) { return !op.wait || op.wait->done >= op.version; }

  void step(std::deque<Op>& q) {
    Op op = std::move(q.front());
    q.pop_front();
    if (op.run) {
      try {
        op.run();
      } catch (const std::exception& e) {  // shows at the host's next wait, in one line
        if (error.empty()) error = e.what(), error = error.substr(0, error.find('\n'));
      }
    }
    if (op.mark) op.mark->done = std::max(op.mark->done, op.version);
  }

  bool roll(int64_t most) {  // up to `most` steps of streams chosen at random
    bool moved = false;
    for (; most > 0; --most) {
      if (!still_for_--) {  // for a while, one stream stands still, or none does
        still_for_ = dice_() % 300;
        size_t chosen = dice_() % (queues_.size() + 1);
        still_ = chosen < queues_.size() ? std::optional(std::next(queues_.begin(), chosen)->first) : std::nullopt;
      }
      std::vector<Key> can;
      for (auto& [k, q] : queues_)
        if (k != still_ && !q.empty() && ready(q.front())) can.push_back(k);
      if (can.empty()) break;
      step(queues_[can[dice_() % can.size()]]);
      moved = true;
    }
    return moved;
  }

  void pump() {
    if (mode_ == CHAOS) {
      if (roll(dice_() % 3)) freed_.notify_all();
      return;
    }
    auto run = [&](bool behind) {
      bool moved = false;
      for (auto& [k, q] : queues_)
        while (!held(k) && slow(k) == behind && !q.empty() && ready(q.front())) {
          step(q);
          moved = true;
          if (behind) return moved;
        }
      return moved;
    };
    while (run(false) || run(true)) {
    }
    freed_.notify_all();
  }

  void force(Key k, const std::function<bool()>& done) {  // what `done` needs, and no more
    auto& q = queues_[k];
    while (!done() && !q.empty()) {
      Op& op = q.front();
      if (!ready(op)) {
        EventPtr e = op.wait;
        size_t version = op.version;
        force(e->where[version - 1], [&] { return e->done >= version; });
      }
      step(q);
    }
  }
};

Machine& machine() {
  static Machine* one = new Machine;
  return *one;
}

}  // namespace sim
