// The simulated device, registered with torch as PrivateUse1. README.md says what it promises.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "memory.h"

extern "C" {  // of Python, whose headers nothing else here needs
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace sim {
namespace {

using at::Tensor, c10::Device, c10::DeviceIndex, c10::IValue, c10::Stream, c10::StreamId, torch::jit::Stack;
using Lock = std::unique_lock<std::mutex>;
constexpr auto SIM = c10::DeviceType::PrivateUse1;

thread_local DeviceIndex current_device = 0;
thread_local std::array<StreamId, DEVICES> current_stream{};

Key key_of(const Stream& s) { return {s.device_index(), s.id()}; }
Key current(DeviceIndex d) {
  d = d < 0 ? current_device : d;
  return {d, current_stream[d]};
}

template <class F>
auto told(F&& act) {  // errors in torch's words
  try {
    return act();
  } catch (const OutOfMemory& e) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, e.what());
  } catch (const c10::Error&) {
    throw;
  } catch (const std::runtime_error& e) {
    TORCH_CHECK(false, e.what());
  }
}

// --- allocators ---------------------------------------------------------------------------------------------------

struct DeviceMemory final : c10::DeviceAllocator {
  static void free(void* p) {
    if (!p) return;
    Lock l(machine().lock);
    memory().give(p);
  }
  c10::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    if (n) told([&] {
      Lock l(machine().lock);
      p = memory().take(n, current(-1));
    });
    return {p, p, &free, Device(SIM, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "sim: copy_data"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& p, Stream s) override {
    Lock l(machine().lock);
    memory().use(p.get(), key_of(s));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override { return {}; }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override {}
} device_memory;
REGISTER_ALLOCATOR(SIM, &device_memory)

void host_register(int64_t p, int64_t n) {
  told([&] {
    Lock l(machine().lock);
    pinned().add(p, n);
  });
}
void host_unregister(int64_t p) {
  told([&] {
    Lock l(machine().lock);
    pinned().remove(p);
  });
}

void sync_device(DeviceIndex d) {
  told([&] {
    Lock l(machine().lock);
    for (Key k : machine().streams_of(d)) machine().sync(l, k);
  });
}

struct PinnedMemory final : c10::Allocator {
  static void free(void* p) {
    if (!p) return;
    // Python's collector may free it on any thread, and the holder of the schedule, for whom that thread waits, needs the GIL.
    void* python = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    for (DeviceIndex d = 0; d < DEVICES; ++d) sync_device(d);  // a real one waits for the copies that use it; this one for all
    if (python) PyEval_RestoreThread(python);
    host_unregister((int64_t)p);
    ::free(p);
  }
  c10::DataPtr allocate(size_t n) override {
    void* p = n ? aligned_alloc(64, (n + 63) / 64 * 64) : nullptr;
    if (p) host_register((int64_t)p, n);
    return {p, p, &free, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
} pinned_memory;

// --- streams, events, devices ---------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SIM; }
  Device exchangeDevice(Device d) const override {
    Device was = getDevice();
    setDevice(d);
    return was;
  }
  Device getDevice() const override { return {SIM, current_device}; }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < DEVICES, "sim has ", DEVICES, " devices");
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current_device = d.index();
  }
  Stream stream(Key k) const { return Stream(Stream::UNSAFE, Device(SIM, k.first), k.second); }
  Stream getStream(Device d) const override { return stream(current(d.index())); }
  Stream getDefaultStream(Device d) const override { return stream({current(d.index()).first, 0}); }
  Stream getNewStream(Device d, int) const override {
    Lock l(machine().lock);
    return stream({current(d.index()).first, machine().new_stream()});
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    Stream was = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return was;
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  static EventPtr& event(void* e) { return *static_cast<EventPtr*>(e); }
  void destroyEvent(void* e, DeviceIndex) const noexcept override { delete static_cast<EventPtr*>(e); }
  void record(void** e, const Stream& s, DeviceIndex, c10::EventFlag) const override {
    Lock l(machine().lock);
    if (!*e) *e = new EventPtr(std::make_shared<Event>());
    machine().record(event(*e), key_of(s));
  }
  void block(void* e, const Stream& s) const override {
    Lock l(machine().lock);
    if (e) machine().block(event(e), key_of(s));
  }
  bool queryEvent(void* e) const override {
    Lock l(machine().lock);
    return !e || machine().reached(event(e));
  }
  bool queryStream(const Stream& s) const override {
    Lock l(machine().lock);
    return machine().idle(key_of(s));
  }
  void synchronizeEvent(void* e) const override {
    if (!e) return;
    told([&] {
      Lock l(machine().lock);
      if (size_t version = event(e)->where.size()) machine().wait(l, event(e), version);
    });
  }
  void synchronizeStream(const Stream& s) const override {
    told([&] {
      Lock l(machine().lock);
      machine().sync(l, key_of(s));
    });
  }
  void synchronizeDevice(DeviceIndex d) const override { sync_device(d); }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override {
    Lock l(machine().lock);
    memory().use(p.get(), key_of(s));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// --- random numbers ---------------------------------------------------------------------------------------------------
// As on a GPU, a kernel's numbers follow from the seed and from how many kernels drew before it, not from when it runs.

struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, drawn_ = 0;

  explicit Generator(DeviceIndex d) : GeneratorImpl(Device(SIM, d), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, drawn_ = 0; }
  void set_offset(uint64_t drawn) override { drawn_ = drawn; }
  uint64_t get_offset() const override { return drawn_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == c10::scalarTypeToTypeMeta(at::kByte), "sim: a state is 16 bytes");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], drawn_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Tensor state = at::empty({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_, words[1] = drawn_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->seed_ = seed_, made->drawn_ = drawn_;
    return made;
  }
  at::Generator next() { return at::detail::createCPUGenerator(seed_ * 0x9E3779B97F4A7C15ull + ++drawn_); }
};

const at::Generator& default_generator(DeviceIndex d) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (DeviceIndex i = 0; i < DEVICES; ++i) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all->at(d < 0 ? current_device : d);
}

// --- hooks ------------------------------------------------------------------------------------------------------------

void resize_storage(const c10::Storage& s, size_t n) {
  c10::DeviceGuard guard(s.device());
  c10::DataPtr fresh = device_memory.allocate(n);
  if (size_t keep = std::min(n, s.nbytes())) {
    uintptr_t old = (uintptr_t)s.data(), now = (uintptr_t)fresh.get();
    char *from = memory().at(s.data()), *to = memory().at(fresh.get());
    Lock l(machine().lock);
    machine().launch(current(s.device().index()), {"resize", {{old, old + keep}}, {{now, now + keep}}}, [=] { memcpy(to, from, keep); });
  }
  s.set_data_ptr_noswap(std::move(fresh));
  s.unsafeGetStorageImpl()->set_nbytes(n);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex d) const override { current_device = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(current_device, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return std::exchange(current_device, d < 0 ? current_device : d); }
  bool isPinnedPtr(const void* p) const override {
    Lock l(machine().lock);
    return pinned().holds((uintptr_t)p, 1);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override { resize_storage(s, n); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return at::make_generator<Generator>(d < 0 ? current_device : d); }
};
const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), at::globalContext().lazyInitDevice(SIM), true);

// --- tensors as kernels see them ----------------------------------------------------------------------------------------

bool ours(const Tensor& t) { return t.defined() && t.device().type() == SIM; }

size_t extent(const Tensor& t) {
  size_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  return t.numel() ? (last + 1) * t.itemsize() : 0;
}

// The pages of `t`; no reference to `t` is kept.
Tensor pages(const Tensor& t) {
  if (!t.defined()) return t;
  if (!t.numel()) return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU));
  void* p = t.data_ptr();
  if (ours(t)) {
    Lock l(machine().lock);
    TORCH_CHECK(memory().live(p, extent(t)), "sim: ", extent(t), " bytes at ", p, " are not inside one live block");
  }
  Tensor seen = at::from_blob(ours(t) ? memory().at(p) : p, t.sizes(), t.strides(), t.options().device(at::kCPU).pinned_memory(false));
  seen._set_conj(t.is_conj());
  seen._set_neg(t.is_neg());
  return seen;
}

// The bytes of `t`: one range where its elements lie close, else one for each run; above 65,536 runs, all from first to last.
void ranges_of(const Tensor& t, std::vector<Range>& into) {
  if (!t.defined() || !t.numel()) return;
  uintptr_t first = (uintptr_t)t.data_ptr();
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size: from the innermost on
  for (int64_t i = 0; i < t.dim(); ++i)
    if (t.size(i) > 1) dims.emplace_back(t.stride(i), t.size(i));
  std::sort(dims.begin(), dims.end());
  int64_t run = 1;
  size_t inner = 0;
  while (inner < dims.size() && dims[inner].first <= run) run = std::max(run, dims[inner].first * (dims[inner].second - 1) + run), ++inner;
  int64_t runs = 1;
  for (size_t i = inner; i < dims.size(); ++i) runs *= dims[i].second;
  if (runs > 65536) {
    into.push_back({first, first + extent(t)});
    return;
  }
  for (int64_t k = 0; k < runs; ++k) {
    int64_t at = 0, rest = k;
    for (size_t i = inner; i < dims.size(); ++i) at += rest % dims[i].second * dims[i].first, rest /= dims[i].second;
    into.push_back({first + at * t.itemsize(), first + (at + run) * t.itemsize()});
  }
}

// What runs when a stream gets there, on whatever thread: kernels of the CPU, and nothing that watches the user's calls.
template <class F>
std::function<void()> kernel_of(F run) {
  return [run = std::move(run)]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard modes(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
    run();
  };
}

// --- copies -------------------------------------------------------------------------------------------------------------

struct Faults {
  int64_t copy = -1;       // so many copies on, one raises at once
  int64_t half_copy = -1;  // so many copies on, one stops half way, which shows at the host's next wait
} faults;

bool strikes(int64_t& left) { return left >= 0 && left-- == 0; }

Tensor copy_from(const Tensor& src, const Tensor& dst, bool non_blocking) {
  if (!dst.numel()) return dst;
  bool half = false;
  {
    Lock l(machine().lock);
    TORCH_CHECK_WITH(OutOfMemoryError, !strikes(faults.copy), "sim: this copy fails, as asked for");
    half = strikes(faults.half_copy);
  }
  bool down = ours(src) && !ours(dst), up = !ours(src);
  if (up && (!dst.is_contiguous() || src.scalar_type() != dst.scalar_type())) {  // through the device, as CUDA does
    Tensor row = at::empty(src.sizes(), src.options().device(dst.device()).pinned_memory(false));
    copy_from(src.contiguous(), row, non_blocking);
    return copy_from(row.expand_as(dst), dst, true);
  }
  const Tensor& host = down ? dst : src;
  void* at = host.data_ptr();
  size_t n = extent(host);
  Key k = current((down ? src : dst).device().index()), other = k;
  bool across = !up && !down && src.device() != dst.device();
  if (across) k = current(src.device().index()), other = current(dst.device().index());
  bool direct = !up && !down;
  if (!direct) {
    Lock l(machine().lock);
    direct = pinned().holds((uintptr_t)at, n) && host.is_contiguous();
    if (non_blocking && !direct) ++machine().counts.unpinned;
  }
  bool later = (up || down) && non_blocking && direct;
  Tensor from = up && !later ? src.clone() : pages(src), to = pages(dst);
  Touched touched{up ? "a copy to the device" : down ? "a copy to the host" : "a copy", {}, {}};
  if (!up || later) ranges_of(src, touched.reads);
  ranges_of(dst, touched.writes);
  told([&] {
    Lock l(machine().lock);
    if (down) ++machine().counts.copies_down, machine().counts.bytes_down += n;
    if (up) ++machine().counts.copies_up, machine().counts.bytes_up += n;
    if (later && down) memset(at, POISON, n);  // nobody may read it before the copy is done
    if (across) {  // both devices' streams take part
      auto e = std::make_shared<Event>();
      machine().record(e, other);
      machine().block(e, k);
    }
    machine().launch(k, touched, kernel_of([=]() mutable {
      if (later) TORCH_CHECK(pinned().holds((uintptr_t)at, n), "host memory was unpinned while a copy was under way");
      if (half) {
        Tensor a = to.flatten(), b = from.flatten();
        Tensor first = a.narrow(0, 0, a.numel() / 2);
        if (to.is_contiguous()) at::native::copy_(first, b.narrow(0, 0, a.numel() / 2), false);
        TORCH_CHECK(false, "a copy stopped half way, as asked for");
      }
      at::native::copy_(to, from, false);
    }));
    if (across) {
      auto e = std::make_shared<Event>();
      machine().record(e, k);
      machine().block(e, other);
    }
    if (down ? !later : up && !non_blocking) machine().sync(l, k);
  });
  return dst;
}

// --- kernels --------------------------------------------------------------------------------------------------------------

IValue mapped(const IValue& v, const std::function<Tensor(const Tensor&)>& f, Device d) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& t : v.toTensorVector()) made.push_back(f(t));
    return made;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const auto& t : v.toOptionalTensorVector()) made.push_back(t ? std::optional(f(*t)) : t);
    return made;
  }
  return v.isDevice() ? IValue(d) : v;
}

// What the meta kernels answered: most are written in Python, and take far longer than the work itself.
struct Answer {
  bool known;
  Stack made;
};
std::mutex answers_lock;
std::unordered_map<std::string, Answer> answers;

bool describe(std::ostream& to, const IValue& v) {
  if (v.isTensor()) {
    const Tensor& t = v.toTensor();
    to << 't';
    if (t.defined())
      to << t.device() << t.dtype() << t.sizes() << t.strides() << t.storage_offset() << t.unsafeGetTensorImpl()->is_wrapped_number();
  } else if (v.isList()) {
    to << '[';
    for (const IValue& each : v.toListRef())
      if (!describe(to, each)) return false;
    to << ']';
  } else if (v.isNone() || v.isScalar() || v.isString() || v.isDevice()) {
    to << v.tagKind() << v;
  } else {
    return false;
  }
  to << ';';
  return true;
}

// The operator and the kinds of its arguments, as text; empty if some cannot be told.
std::string call_of(const c10::OperatorHandle& op, const Stack& given) {
  std::ostringstream to;
  to.precision(17);
  to << op.operator_name() << ';';
  for (const IValue& v : given)
    if (!describe(to, v)) return "";
  return to.str();
}

bool recall(const std::string& call, bool& known, Stack& made) {
  std::lock_guard<std::mutex> l(answers_lock);
  auto found = answers.find(call);
  if (call.empty() || found == answers.end()) return false;
  known = found->second.known, made = found->second.made;
  return true;
}

void remember(const std::string& call, bool known, const Stack& made) {
  std::lock_guard<std::mutex> l(answers_lock);
  if (!call.empty()) answers[call] = {known, known ? made : Stack()};
}

// Any operator: shapes from the meta kernel, values from the CPU's, which runs when the stream gets there.
void kernel(const c10::OperatorHandle& op, Stack* stack) {
  const auto& args = op.schema().arguments();
  const auto& returns = op.schema().returns();
  Stack given(stack->end() - args.size(), stack->end());
  DeviceIndex where = -1;
  for (const IValue& v : given) {
    mapped(v, [&](const Tensor& t) { return where = where < 0 && ours(t) ? t.device().index() : where, t; }, at::kCPU);
    if (v.isDevice() && v.toDevice().type() == SIM && where < 0) where = v.toDevice().index();
  }
  Device device(SIM, current(where).first);
  c10::DeviceGuard guard(device);
  bool draws = false;
  for (size_t i = 0; i < args.size(); ++i) {
    const auto& type = *args[i].type();
    if (type.kind() != c10::TypeKind::OptionalType && type.kind() != c10::TypeKind::GeneratorType) continue;
    if (type.str().find("Generator") == std::string::npos) continue;
    at::Generator own = given[i].isGenerator() ? given[i].toGenerator() : default_generator(device.index());
    if (own.device().type() == SIM) given[i] = static_cast<Generator*>(own.unsafeGetGeneratorImpl())->next();
    draws = true;
  }

  // 1. What comes out, from the meta kernel. Where there is none, or a number comes out, the host waits.
  Stack meta;
  for (const IValue& v : given)
    meta.push_back(mapped(v, [](const Tensor& t) {
      return !t.defined() || (!ours(t) && !t.dim()) ? t : at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
    }, at::kMeta));
  const Stack shapes = meta;
  bool known = std::all_of(returns.begin(), returns.end(), [](auto& r) {
    auto kind = r.type()->kind();
    return kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType;
  });
  if (draws)
    for (size_t i = 0; i < meta.size(); ++i)
      if (given[i].isGenerator()) meta[i] = IValue();
  const std::string call = known ? call_of(op, meta) : "";
  if (!recall(call, known, meta)) {
    try {
      if (known) op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &meta);
    } catch (const std::exception&) {
      known = false;
    }
    if (known && op.schema().name() == "aten::native_layer_norm") {  // the CPU keeps mean and deviation in the type of the weights
      auto type = (given[2].isTensor() ? given[2] : given[0]).toTensor().scalar_type();
      for (size_t i : {1, 2}) meta[i] = meta[i].toTensor().to(type);
    }
    bool resized = false;
    for (size_t i = 0; i < args.size(); ++i)
      resized |= given[i].isTensor() && ours(given[i].toTensor()) && shapes[i].toTensor().sizes() != given[i].toTensor().sizes();
    if (!resized) remember(call, known, meta);
  }
  if (known)  // out= may have been resized
    for (size_t i = 0; i < args.size(); ++i)
      if (given[i].isTensor() && ours(given[i].toTensor()) && shapes[i].toTensor().sizes() != given[i].toTensor().sizes())
        given[i].toTensor().resize_(shapes[i].toTensor().sizes());

  // 2. The CPU's kernel on the device's pages.
  auto work = std::make_shared<Stack>();
  Touched touched{op.schema().operator_name().name, {}, {}};
  int64_t read_bytes = 0;
  for (size_t i = 0; i < args.size(); ++i) {
    bool writes = args[i].alias_info() && args[i].alias_info()->isWrite();
    work->push_back(mapped(given[i], [&](const Tensor& t) {
      if (t.defined() && !ours(t)) return t.clone();
      if (t.defined()) {
        ranges_of(t, writes ? touched.writes : touched.reads);
        read_bytes += t.nbytes();
      }
      return pages(t);
    }, at::kCPU));
  }
  Stack out;
  auto outs = std::make_shared<std::vector<Tensor>>();
  auto fresh = [&](const Tensor& like) {
    if (!like.defined()) return like;
    Tensor made = at::empty_strided(like.sizes(), like.strides(), like.options().device(device));
    ranges_of(made, touched.writes);
    outs->push_back(pages(made));
    return made;
  };
  for (size_t i = 0; known && i < returns.size(); ++i)
    if (!returns[i].alias_info()) out.push_back(mapped(meta[i], fresh, device));
  told([&] {
    Lock l(machine().lock);
    machine().counts.read_bytes += read_bytes;
    machine().launch(current(device.index()), touched, kernel_of([=] {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), work.get());
      size_t at = 0;
      for (size_t i = 0; known && i < returns.size(); ++i)
        if (!returns[i].alias_info())
          mapped((*work)[i], [&](const Tensor& t) { return t.defined() ? at::native::copy_((*outs)[at++], t, false) : t; }, at::kCPU);
    }));
    if (!known) machine().sync(l, current(device.index()));
  });

  // 3. What is returned: the arguments that were written, the new tensors, or what the host waited for.
  torch::jit::drop(*stack, args.size());
  for (size_t i = 0, at = 0; i < returns.size(); ++i) {
    const auto* alias = returns[i].alias_info();
    if (alias) {
      TORCH_CHECK(alias->isWrite(), "sim: ", op.schema().operator_name(), " is a view: give it a kernel");
      for (size_t j = 0; j < args.size(); ++j)
        if (args[j].alias_info() && *args[j].alias_info() == *alias) stack->push_back(given[j]);
    } else {
      stack->push_back(known ? out[at++] : mapped((*work)[i], [&](const Tensor& t) { return t.defined() ? t.to(device) : t; }, device));
    }
  }
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
Tensor copy_from_and_resize(const Tensor& src, const Tensor& dst) {
  if (src.sizes() != dst.sizes()) dst.resize_(src.sizes());
  return copy_from(src, dst, false);
}
at::Scalar item(const Tensor& t) { return t.to(at::kCPU).item(); }
const Tensor& resize(const Tensor& t, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  size_t need = at::detail::computeStorageNbytesContiguous(size, t.itemsize(), t.storage_offset());
  if (need > t.storage().nbytes()) resize_storage(t.storage(), need);
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return t;
}
void record_stream(Tensor& t, Stream s) {
  Lock l(machine().lock);
  memory().use(t.storage().mutable_data(), key_of(s));
}

// --- convolutions, which torch gives to each device by another name -----------------------------------------------------------

using Optional = std::optional<Tensor>;

template <class F>  // `run` gets the CPU's views of `in`, and fills those of `out`
void launched(const char* name, const std::vector<Tensor>& in, const std::vector<Tensor>& out, F run) {
  Touched touched{name, {}, {}};
  std::vector<Tensor> seen, filled;
  for (const Tensor& t : in) ranges_of(t, touched.reads), seen.push_back(pages(t));
  for (const Tensor& t : out) ranges_of(t, touched.writes), filled.push_back(pages(t));
  Lock l(machine().lock);
  for (const Tensor& t : in) machine().counts.read_bytes += t.defined() ? t.nbytes() : 0;
  machine().launch(current(in[0].device().index()), touched, kernel_of([=]() mutable { run(seen, filled); }));
}

Tensor like_meta(const Tensor& t) {
  return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta)) : t;
}
Optional maybe(const Tensor& t) { return t.defined() ? Optional(t) : std::nullopt; }

Tensor convolution(const Tensor& input, const Tensor& weight, const Optional& bias, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                   c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  auto s = C10_AS_INTARRAYREF_SLOW(stride).vec(), p = C10_AS_INTARRAYREF_SLOW(padding).vec(), d = C10_AS_INTARRAYREF_SLOW(dilation).vec();
  auto o = C10_AS_INTARRAYREF_SLOW(output_padding).vec();
  int64_t g = groups.guard_int(__FILE__, __LINE__);
  Tensor b = bias.value_or(Tensor());
  Tensor out = at::empty(at::convolution(like_meta(input), like_meta(weight), maybe(like_meta(b)), s, p, d, transposed, o, g).sizes(), input.options());
  launched("convolution", {input, weight, b}, {out}, [=](auto& in, auto& to) {
    at::native::copy_(to[0], at::convolution(in[0], in[1], maybe(in[2]), s, p, d, transposed, o, g), false);
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  auto s = C10_AS_INTARRAYREF_SLOW(stride).vec(), p = C10_AS_INTARRAYREF_SLOW(padding).vec(), d = C10_AS_INTARRAYREF_SLOW(dilation).vec();
  auto o = C10_AS_INTARRAYREF_SLOW(output_padding).vec();
  int64_t g = groups.guard_int(__FILE__, __LINE__), channels = grad.size(1);
  std::vector<Tensor> out{mask[0] ? at::empty(input.sizes(), input.options()) : Tensor(), mask[1] ? at::empty(weight.sizes(), weight.options()) : Tensor(),
                          mask[2] ? at::empty({channels}, grad.options()) : Tensor()};
  launched("convolution_backward", {grad, input, weight}, out, [=](auto& in, auto& to) {
    std::vector<int64_t> bias{channels};
    auto made = at::convolution_backward(in[0], in[1], in[2], at::OptionalIntArrayRef(bias), s, p, d, transposed, o, g, mask);
    if (mask[0]) at::native::copy_(to[0], std::get<0>(made), false);
    if (mask[1]) at::native::copy_(to[1], std::get<1>(made), false);
    if (mask[2]) at::native::copy_(to[2], std::get<2>(made), false);
  });
  return {out[0], out[1], out[2]};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  // Without these, torch would compute layer norms from other operators, which round otherwise.
  // A mean squared error, too, resizes what it is to fill, which pages cannot.
  for (const char* name : {"native_layer_norm", "native_layer_norm_backward", "mse_loss"}) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&kernel>());
  // One launch for all tensors of a list, as on a GPU; without this, torch would take them one by one.
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames())
    if (op.name.rfind("aten::_foreach_", 0) == 0)
      m.impl((op.name.substr(6) + (op.overload_name.empty() ? "" : "." + op.overload_name)).c_str(),
             torch::CppFunction::makeFromBoxedFunction<&kernel>());
}

// --- the test's side --------------------------------------------------------------------------------------------------------

template <class F>
auto locked(F&& act) {
  return told([&] {
    Lock l(machine().lock);
    return act();
  });
}

TORCH_LIBRARY(sim, m) {
  m.def("let", [](int64_t mode, std::vector<int64_t> streams, int64_t patience_ms, int64_t seed) {
    locked([&] { machine().let(static_cast<Mode>(mode), {streams.begin(), streams.end()}, patience_ms, seed); });
  });
  m.def("counts", []() -> std::vector<int64_t> {
    return locked([] {
      const Counts& c = machine().counts;
      return std::vector<int64_t>{c.launches, c.read_bytes, c.copies_down, c.bytes_down, c.copies_up, c.bytes_up, c.unpinned,
                                  machine().forced[std::this_thread::get_id()], machine().pending(), memory().in_use, memory().peak,
                                  pinned().in_use, machine().launches[std::this_thread::get_id()]};
    });
  });
  m.def("reset_peak", [] { locked([] { memory().peak = memory().in_use; }); });
  m.def("fault", [](std::string what, int64_t after) {
    locked([&] {
      if (what == "copy") faults.copy = after;
      else if (what == "half_copy") faults.half_copy = after;
      else if (what == "kernel") machine().fail_launch = after;
      else if (what == "allocation") memory().fail_allocation = after;
      else throw std::runtime_error("sim knows no fault " + what);
    });
  });
  m.def("limit", [](int64_t device_bytes, int64_t pinned_bytes) {
    locked([&] { memory().limit = device_bytes, pinned().limit = pinned_bytes; });
  });
  m.def("spare_freed", [](bool on) { locked([&] { memory().spares_freed = on; }); });
  m.def("generator", [](int64_t d) { return default_generator(d); });
  m.def("host_register", host_register);
  m.def("host_unregister", host_unregister);
  m.def("check_races", [](bool on) { locked([&] { machine().checks_races = on, machine().shadow.forget(), machine().shadow.take(); }); });
  m.def("races", []() -> std::vector<std::string> { return locked([] { return machine().shadow.take(); }); });
  m.def("host_touches", [](int64_t p, int64_t n, bool writes, std::string what) {
    locked([&] { machine().host_touches({(uintptr_t)p, (uintptr_t)(p + n)}, writes, what); });
  });
}

}  // namespace
}  // namespace sim
