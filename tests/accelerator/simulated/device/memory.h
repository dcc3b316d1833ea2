// The memory of the devices, which the host cannot touch, and the registry of pinned host memory.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "machine.h"

namespace sim {

constexpr size_t REGION = 1ull << 32, GRAIN = 512;
constexpr int POISON = 0xDB;

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Block {
  size_t size, asked;
  Key home;            // the stream that it was made on
  std::set<Key> used;  // other streams, by record_stream
};

class Memory {
 public:
  int64_t limit = INT64_MAX, in_use = 0, peak = 0;
  int64_t fail_allocation = -1;  // so many allocations on, one finds no memory
  bool spares_freed = false;     // freed memory is filled with poison when it is taken again, not when it is freed

  Memory() {
    int fd = memfd_create("sim", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, REGION * DEVICES) != 0) throw std::runtime_error("sim: no memory for the devices");
    device_ = (char*)mmap(nullptr, REGION * DEVICES, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    kernel_ = (char*)mmap(nullptr, REGION * DEVICES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    close(fd);
    if (device_ == MAP_FAILED || kernel_ == MAP_FAILED) throw std::runtime_error("sim: no address space for the devices");
    for (int d = 0; d < DEVICES; ++d) unused_[d] = (uintptr_t)device_ + REGION * d;
  }

  // The same bytes as kernels see them.
  char* at(const void* p) const { return kernel_ + ((const char*)p - device_); }

  // --- the lock of the machine is held -----------------------------------------------------------------------------
  void* take(size_t n, Key home) {
    collect();
    if (fail_allocation >= 0 && fail_allocation-- == 0) throw OutOfMemory("sim: this allocation fails, as asked for");
    if (in_use + (int64_t)n > limit) throw OutOfMemory("sim: out of memory");
    size_t size = (n + GRAIN - 1) / GRAIN * GRAIN;
    uintptr_t p = reused(size, home);
    if (!p) p = fresh(size, home);
    blocks_[p] = {size, n, home, {}};
    in_use += n;
    peak = std::max(peak, in_use);
    return (void*)p;
  }

  void give(void* ptr) {
    auto it = blocks_.find((uintptr_t)ptr);
    if (it == blocks_.end()) return;
    Block block = it->second;
    uintptr_t p = it->first;
    blocks_.erase(it);
    in_use -= block.asked;
    Limbo waits{p, block, {}};
    for (Key k : block.used) {
      auto e = std::make_shared<Event>();
      machine().record(e, k);
      waits.until.push_back(e);
    }
    if (waits.until.empty())
      recycle(p, block);
    else
      limbo_.push_back(std::move(waits));
  }

  void use(void* ptr, Key k) {
    auto it = around((uintptr_t)ptr);
    if (it != blocks_.end() && it->second.home != k) it->second.used.insert(k);
  }

  bool live(const void* p, size_t n) {  // all of it in one live block
    auto it = around((uintptr_t)p);
    return it != blocks_.end() && (uintptr_t)p + n <= it->first + it->second.asked;
  }

 private:
  struct Limbo {
    uintptr_t at;
    Block block;
    std::vector<EventPtr> until;
  };
  char *device_, *kernel_;
  uintptr_t unused_[DEVICES];
  std::map<uintptr_t, Block> blocks_;
  std::map<Key, std::vector<std::pair<uintptr_t, size_t>>> free_;  // the last one freed is handed out first
  std::vector<Limbo> limbo_;

  std::map<uintptr_t, Block>::iterator around(uintptr_t p) {
    auto it = blocks_.upper_bound(p);
    if (it == blocks_.begin()) return blocks_.end();
    --it;
    return p < it->first + std::max<size_t>(it->second.asked, 1) ? it : blocks_.end();
  }

  void collect() {
    for (auto it = limbo_.begin(); it != limbo_.end();) {
      bool over = true;
      for (auto& e : it->until) over = machine().reached(e) && over;
      if (over) recycle(it->at, it->block);
      it = over ? limbo_.erase(it) : it + 1;
    }
  }

  void recycle(uintptr_t p, const Block& block) {
    if (!spares_freed) poison(p, block.asked, block.size, block.home);
    free_[block.home].emplace_back(p, block.size);
  }

  void poison(uintptr_t p, size_t asked, size_t size, Key home) {
    char* where = at((void*)p);
    machine().poison(home, {p, p + asked}, [=] { memset(where, POISON, size); });
  }

  uintptr_t reused(size_t size, Key home) {
    auto& list = free_[home];
    for (size_t i = list.size(); i-- > 0;)
      if (list[i].second >= size) {
        auto [p, whole] = list[i];
        list.erase(list.begin() + i);
        if (whole > size) list.insert(list.begin(), {p + size, whole - size});
        if (spares_freed) poison(p, size, size, home);
        return p;
      }
    return 0;
  }

  uintptr_t fresh(size_t size, Key home) {
    uintptr_t p = unused_[home.first];
    if (p + size + GRAIN > (uintptr_t)device_ + REGION * (home.first + 1)) throw OutOfMemory("sim: the device's memory is used up");
    unused_[home.first] += size + GRAIN;  // a gap, so that an access past the end is seen
    memset(at((void*)p), POISON, size);
    return p;
  }
};

class Pinned {
 public:
  int64_t limit = INT64_MAX, in_use = 0;

  void add(uintptr_t p, size_t n) {
    auto it = ranges_.lower_bound(p);
    bool overlaps = (it != ranges_.end() && it->first < p + n) || (it != ranges_.begin() && std::prev(it)->second > p);
    if (overlaps) throw std::runtime_error("sim: some of that memory is pinned already");
    if (in_use + (int64_t)n > limit) throw std::runtime_error("sim: no more host memory can be pinned");
    ranges_[p] = p + n;
    in_use += n;
  }
  void remove(uintptr_t p) {
    auto it = ranges_.find(p);
    if (it == ranges_.end()) throw std::runtime_error("sim: that memory is not pinned");
    in_use -= it->second - it->first;
    ranges_.erase(it);
  }
  bool holds(uintptr_t p, size_t n) const {
    auto it = ranges_.upper_bound(p);
    return it != ranges_.begin() && p + n <= std::prev(it)->second;
  }

 private:
  std::map<uintptr_t, uintptr_t> ranges_;
};

Memory& memory() {
  static Memory* one = new Memory;
  return *one;
}
Pinned& pinned() {
  static Pinned* one = new Pinned;
  return *one;
}

}  // namespace sim
