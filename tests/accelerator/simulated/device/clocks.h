// The happens-before check: vector clocks of streams and of the host, and who last touched each byte.
//
// Two accesses to one byte, at least one of them a write, race unless an event, a stream's own order or a wait of the host puts
// one before the other. This is decided when work is queued, so a race is reported under every schedule, even if the bytes
// happen to be right. All threads of the host count as one actor: the check sees no race between two threads of the host.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace sim {

struct Clock {
  std::vector<uint64_t> ticks;  // by actor

  uint64_t of(size_t actor) const { return actor < ticks.size() ? ticks[actor] : 0; }
  uint64_t tick(size_t actor) {
    if (ticks.size() <= actor) ticks.resize(actor + 1);
    return ++ticks[actor];
  }
  void join(const Clock& other) {
    if (ticks.size() < other.ticks.size()) ticks.resize(other.ticks.size());
    for (size_t i = 0; i < other.ticks.size(); ++i) ticks[i] = std::max(ticks[i], other.ticks[i]);
  }
};

struct Range {
  uintptr_t from, to;
};

struct Access {
  size_t actor = 0;
  uint64_t time = 0;  // 0: none
  std::string what;
};

class Shadow {
 public:
  void read(Range range, size_t actor, const Clock& clock, const std::string& what) {
    visit(range, [&](Cell& cell) {
      check(cell.wrote, actor, clock, what, "reads", range);
      for (Access& one : cell.reads)
        if (one.actor == actor) {
          one = {actor, clock.of(actor), what};
          return;
        }
      cell.reads.push_back({actor, clock.of(actor), what});
    });
  }

  void write(Range range, size_t actor, const Clock& clock, const std::string& what) {
    visit(range, [&](Cell& cell) {
      check(cell.wrote, actor, clock, what, "writes", range);
      for (const Access& one : cell.reads) check(one, actor, clock, what, "writes", range);
      cell.reads.clear();
      cell.wrote = {actor, clock.of(actor), what};
    });
  }

  void forget() { cells_.clear(); }
  std::vector<std::string> take() {
    std::vector<std::string> said(races_.begin(), races_.end());
    races_.clear();
    return said;
  }

 private:
  struct Cell {
    uintptr_t to;
    Access wrote;
    std::vector<Access> reads;
  };
  std::map<uintptr_t, Cell> cells_;  // disjoint, by their first byte
  std::set<std::string> races_;

  void check(const Access& before, size_t actor, const Clock& clock, const std::string& what, const char* how, Range range) {
    if (!before.time || before.actor == actor || clock.of(before.actor) >= before.time || races_.size() >= 100) return;
    races_.insert(what + " " + how + " memory of " + before.what + ", and nothing puts it after");
  }

  void cut(uintptr_t at) {
    auto it = cells_.upper_bound(at);
    if (it == cells_.begin()) return;
    --it;
    if (it->first == at || it->second.to <= at) return;
    Cell rest = it->second;
    it->second.to = at;
    cells_.emplace(at, std::move(rest));
  }

  template <class F>
  void visit(Range range, F&& act) {
    if (range.from >= range.to) return;
    cut(range.from);
    cut(range.to);
    uintptr_t at = range.from;
    for (auto it = cells_.lower_bound(range.from); at < range.to;) {
      if (it == cells_.end() || it->first >= range.to) {
        Cell& made = cells_[at] = {range.to, {}, {}};
        act(made);
        return;
      }
      if (it->first > at) {
        Cell& made = cells_[at] = {it->first, {}, {}};
        act(made);
      }
      at = it->second.to;
      act(it->second);
      ++it;
    }
  }
};

}  // namespace sim
