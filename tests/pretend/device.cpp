// A CUDA device that is not there: torch's CUDA device type, served by the host.
//
// Its memory is the host's, but only kernels and copies reach it.  Its streams
// are threads: what is queued on one runs in order, late and at a time of its
// own.  Kernels are torch's for the CPU.  With delays they too are queued, to
// read and write when their stream comes to it; those that draw random numbers,
// or whose results have shapes that only values tell, wait for their stream and
// run at once.  Memory that is freed goes to the next who asks on that stream,
// as the caching allocator has it, and is overwritten at that place in the
// stream.  So a copy or a kernel that runs before its source is written, after
// its source is freed, or beside the reader of its target gives a wrong result
// here, as it may on a device.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using Clock = std::chrono::steady_clock;

constexpr size_t kRound = 512;  // as the caching allocator rounds
constexpr int kPoison = 0xFF;   // NaN, for floating-point numbers

const Device kDevice(DeviceType::CUDA, 0);

// ---------------------------------------------------------------- streams

std::atomic<int64_t> most_delay_us{0};
std::atomic<uint64_t> seed{0};

class Lane {
 public:
  explicit Lane(uint64_t number)
      : number_(number), random_(seed + 7919 * number), thread_([this] { run(); }) {
    thread_.detach();  // lanes live as long as the process
  }

  void submit(std::function<void()> task, bool may_block = false) {
    std::unique_lock<std::mutex> lock(mutex_);
    // Without delays the default stream is as early as it may be: it costs no change of threads.
    if (number_ == 0 && most_delay_us == 0 && !may_block && idle()) {
      busy_ = true;
      lock.unlock();
      task();
      lock.lock();
      busy_ = false;
    } else {
      tasks_.push_back(std::move(task));
    }
    changed_.notify_all();
  }

  void drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return idle(); });
  }

  bool query() {
    std::lock_guard<std::mutex> lock(mutex_);
    return idle();
  }

 private:
  bool idle() const { return tasks_.empty() && !busy_; }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !tasks_.empty() && !busy_; });
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      lock.unlock();
      dawdle();
      task();
      task = nullptr;  // what it held is let go outside the lock
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  void dawdle() {
    const int64_t most = most_delay_us;
    if (most > 0 && random_() % 4 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % most));
  }

  const uint64_t number_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool busy_ = false;
  std::mt19937_64 random_;
  std::thread thread_;
};

std::mutex lanes_mutex;

std::vector<Lane*>& lanes() {
  static auto* all = new std::vector<Lane*>{new Lane(0)};
  return *all;
}

Lane& lane(c10::StreamId id) {
  std::lock_guard<std::mutex> lock(lanes_mutex);
  return *lanes().at(id);
}

c10::StreamId new_lane() {
  std::lock_guard<std::mutex> lock(lanes_mutex);
  lanes().push_back(new Lane(lanes().size()));
  return static_cast<c10::StreamId>(lanes().size() - 1);
}

thread_local c10::StreamId current_id = 0;

Lane& current() { return lane(current_id); }

void drain_all() {
  std::vector<Lane*> all;
  {
    std::lock_guard<std::mutex> lock(lanes_mutex);
    all = lanes();
  }
  for (auto* one : all) one->drain();
}

struct Moment {
  void set() {
    std::lock_guard<std::mutex> lock(mutex);
    done = true;
    at = Clock::now();
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return done; });
  }
  bool query() {
    std::lock_guard<std::mutex> lock(mutex);
    return done;
  }
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  Clock::time_point at;
};

using Moments = std::shared_ptr<Moment>;

Moments mark(Lane& where) {
  auto moment = std::make_shared<Moment>();
  where.submit([moment] { moment->set(); });
  return moment;
}

// ----------------------------------------------------------------- memory

struct Block {
  void* data;
  size_t nbytes;
  c10::StreamId home;
  std::set<c10::StreamId> users;  // by record_stream
};

class DeviceMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &free_block, kDevice};
    const size_t nbytes = (n + kRound - 1) / kRound * kRound;
    std::lock_guard<std::mutex> lock(mutex_);
    take_back();
    auto& pool = pools_[{current_id, nbytes}];
    void* data = nullptr;
    if (!pool.empty()) {
      data = pool.back();
      pool.pop_back();
    } else {
      if (reserved_ + nbytes > total) empty_pools();
      TORCH_CHECK_WITH(OutOfMemoryError, reserved_ + nbytes <= total, "CUDA out of memory. ",
                       "Tried to allocate ", n, " bytes.");
      TORCH_CHECK(posix_memalign(&data, kRound, nbytes) == 0, "no host memory");
      std::memset(data, kPoison, nbytes);
      reserved_ += nbytes;
    }
    allocated += nbytes;
    peak = std::max(peak, allocated);
    auto* block = new Block{data, nbytes, current_id, {}};
    blocks_[data] = block;
    return {data, block, &free_block, kDevice};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, size_t n) const override {
    current().drain();
    std::memcpy(to, from, n);
  }

  void record(const void* data, c10::StreamId user) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.find(data);
    if (found != blocks_.end() && found->second->home != user) found->second->users.insert(user);
  }

  int64_t reserved() {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(reserved_);
  }

  void empty_cache() {
    std::lock_guard<std::mutex> lock(mutex_);
    empty_pools();
  }

  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    peak = allocated;
  }

  size_t total = size_t(4) << 30;
  size_t allocated = 0;
  size_t peak = 0;

 private:
  static void free_block(void* context);

  void release(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_.erase(block->data);
    allocated -= block->nbytes;
    std::vector<Moments> waits;
    for (auto user : block->users) waits.push_back(mark(lane(user)));
    if (waits.empty())
      hand_on(block);
    else
      later_.emplace_back(block, std::move(waits));
  }

  // To the next on its stream, and overwritten there: whoever still reads it is too late.
  void hand_on(Block* block) {
    lane(block->home).submit(
        [data = block->data, n = block->nbytes] { std::memset(data, kPoison, n); });
    pools_[{block->home, block->nbytes}].push_back(block->data);
    delete block;
  }

  void take_back() {
    for (auto it = later_.begin(); it != later_.end();) {
      bool done = true;
      for (auto& moment : it->second) done = done && moment->query();
      if (done) {
        hand_on(it->first);
        it = later_.erase(it);
      } else {
        ++it;
      }
    }
  }

  void empty_pools() {
    drain_all();
    for (auto& [key, pool] : pools_) {
      for (void* data : pool) {
        free(data);
        reserved_ -= key.second;
      }
      pool.clear();
    }
  }

  std::mutex mutex_;
  size_t reserved_ = 0;
  std::map<std::pair<c10::StreamId, size_t>, std::vector<void*>> pools_;
  std::map<const void*, Block*> blocks_;
  std::vector<std::pair<Block*, std::vector<Moments>>> later_;
};

DeviceMemory& memory() {
  static auto* it = new DeviceMemory;
  return *it;
}

void DeviceMemory::free_block(void* context) {
  if (context != nullptr) memory().release(static_cast<Block*>(context));
}

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &free_pinned, c10::Device(DeviceType::CPU)};
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, n) == 0, "no host memory");
    std::memset(data, kPoison, n);
    std::lock_guard<std::mutex> lock(mutex_);
    pieces_[static_cast<char*>(data)] = n;
    return {data, data, &free_pinned, c10::Device(DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }

  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }

  bool has(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* at = static_cast<const char*>(data);
    auto after = pieces_.upper_bound(const_cast<char*>(at));
    if (after == pieces_.begin()) return false;
    --after;
    return at < after->first + after->second;
  }

 private:
  static void free_pinned(void* data);

  std::mutex mutex_;
  std::map<char*, size_t> pieces_;
};

PinnedMemory& pinned() {
  static auto* it = new PinnedMemory;
  return *it;
}

void PinnedMemory::free_pinned(void* data) {
  if (data == nullptr) return;
  std::lock_guard<std::mutex> lock(pinned().mutex_);
  auto found = pinned().pieces_.find(static_cast<char*>(data));
  std::memset(data, kPoison, found->second);
  pinned().pieces_.erase(found);
  free(data);
}

// ------------------------------------------------------- what torch asks for

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
  }
  c10::Stream getStream(Device) const override { return stream(current_id); }
  c10::Stream getDefaultStream(Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(Device, bool) const override { return stream(new_lane()); }
  c10::Stream getNewStream(Device, int) const override { return stream(new_lane()); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = current_id;
    current_id = s.id();
    return stream(before);
  }
  bool queryStream(const c10::Stream& s) const override { return lane(s.id()).query(); }
  void synchronizeStream(const c10::Stream& s) const override { lane(s.id()).drain(); }
  void synchronizeDevice(const DeviceIndex) const override { drain_all(); }

  void record(void** event, const c10::Stream& s, const DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Moments;
    *static_cast<Moments*>(*event) = mark(lane(s.id()));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event == nullptr) return;
    lane(s.id()).submit([moment = *static_cast<Moments*>(event)] { moment->wait(); }, true);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || (*static_cast<Moments*>(event))->query();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) (*static_cast<Moments*>(event))->wait();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Moments*>(event);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    auto &a = *static_cast<Moments*>(first), &b = *static_cast<Moments*>(second);
    return std::chrono::duration<double, std::milli>(b->at - a->at).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    memory().record(data.get(), s.id());
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

at::Generator& generator() {
  static auto* it = new at::Generator(at::detail::createCPUGenerator(0));
  return *it;
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return generator(); }
  Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* data) const override { return pinned().has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &memory(); }
  void deviceSynchronize(DeviceIndex) const override { drain_all(); }
};

using at::CUDAHooksArgs;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks);

// ------------------------------------------------------------------ kernels

thread_local bool in_kernel = false;

// The same memory, as a tensor of the host: holds no reference, as a kernel holds none.
Tensor of_host(const Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  auto* begin = static_cast<char*>(tensor.storage().mutable_data());
  return at::from_blob(begin + tensor.storage_offset() * tensor.element_size(), tensor.sizes(),
                       tensor.strides(), tensor.options().device(at::kCPU));
}

void copy_now(const Tensor& to, const Tensor& from) {
  if (to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() &&
      to.is_contiguous() && from.is_contiguous()) {
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
  } else {
    at::AutoDispatchBelowADInplaceOrView guard;
    to.copy_(from);
  }
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  Lane& here = current();
  Tensor to = of_host(self), from = of_host(source);
  bool wait = false;
  if (!source.is_cuda()) {
    const bool is_pinned = pinned().has(source.storage().data());
    wait = is_pinned && !non_blocking;
    if (!is_pinned && !in_kernel) from = from.clone();  // as the driver does
  } else if (!self.is_cuda()) {
    wait = !non_blocking || !pinned().has(self.storage().data());
  }
  here.submit([to, from] { copy_now(to, from); });
  if (wait) here.drain();
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  Tensor to = target;
  if (self.is_cuda() || target.is_cuda()) return copy_(to, self, non_blocking);
  return to.copy_(self, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  if (target.sizes() != self.sizes()) target.resize_(self.sizes());
  return copy_from(self, target, false);
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
             std::optional<c10::Layout>, std::optional<Device>, std::optional<bool> pin,
             std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(size, &memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                     std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size,
                      std::optional<c10::MemoryFormat> format) {
  current().drain();
  return at::native::resize_(self, size, format);
}

void record_stream(Tensor& self, c10::Stream stream) {
  memory().record(self.storage().data(), stream.id());
}

// Queues torch's CPU kernel; returns false, and does nothing, if that cannot be: where its results
// are no tensors, lie where its arguments do, or are of shapes that only their values tell.
bool queued(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  // Its statistics have other shapes on the CPU than they are told to have.
  if (schema.name().find("batch_norm") != std::string::npos) return false;
  const size_t count = schema.arguments().size();
  std::vector<c10::IValue> shapes, given(stack->end() - count, stack->end());
  std::vector<Tensor> written;  // by the operator itself, in the order of its results
  for (size_t k = 0; k < count; ++k) {
    const auto* alias = schema.arguments()[k].alias_info();
    if (given[k].isTensorList() || given[k].isOptionalTensorList()) return false;
    if (alias != nullptr && !(alias->isWrite() && given[k].isTensor())) return false;
    if (alias != nullptr) written.push_back(given[k].toTensor());
  }
  if (schema.returns().empty()) return false;
  for (const auto& each : schema.returns())
    if (!each.type()->isSubtypeOf(*c10::TensorType::get()) ||
        (each.alias_info() != nullptr) != !written.empty())
      return false;
  for (const auto& value : given) {
    const bool there = value.isTensor() && value.toTensor().defined();
    if (there && value.toTensor().layout() != at::kStrided) return false;
    shapes.push_back(there ? c10::IValue(at::empty_strided(
                                 value.toTensor().sizes(), value.toTensor().strides(),
                                 value.toTensor().options().device(at::kMeta)))
                           : value);
  }
  try {
    op.callBoxed(&shapes);
  } catch (const std::exception&) {
    return false;
  }
  std::vector<Tensor> results;
  if (written.empty()) {
    for (const auto& shape : shapes) {
      const auto& meta = shape.toTensor();
      if (!meta.defined() || !meta.is_meta()) return false;
      results.push_back(at::empty_strided(meta.sizes(), meta.strides(),
                                          meta.options().device(kDevice)));
    }
  } else {
    for (size_t k = 0; k < written.size(); ++k)
      if (shapes[k].toTensor().sizes() != written[k].sizes()) return false;  // it resizes
    results = written;
  }
  std::vector<c10::IValue> seen;
  for (const auto& value : given) {
    const bool there = value.isTensor() && value.toTensor().defined();
    Tensor tensor = there ? value.toTensor() : Tensor();
    // Of the host they are numbers, taken at once.
    if (there) tensor = tensor.is_cuda() ? of_host(tensor) : tensor.clone();
    seen.push_back(there ? c10::IValue(tensor) : value);
  }
  std::vector<Tensor> targets;
  if (written.empty())
    for (const auto& result : results) targets.push_back(of_host(result));
  current().submit([op, seen, targets]() mutable {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(&seen);
    for (size_t k = 0; k < targets.size(); ++k) copy_now(targets[k], seen[k].toTensor());
  });
  torch::jit::drop(*stack, count);
  for (auto& result : results) stack->emplace_back(std::move(result));
  return true;
}

// torch's CPU kernel, on the random numbers of the device.
void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  struct Flag {
    bool before = in_kernel;
    Flag() { in_kernel = true; }
    ~Flag() { in_kernel = before; }
  } flag;
  const bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  if (most_delay_us > 0 && !draws && queued(op, stack)) return;
  current().drain();
  if (!draws) {
    at::native::cpu_fallback(op, stack);
    return;
  }
  auto host = at::detail::getDefaultCPUGenerator();
  struct Exchange {
    at::Generator host, saved;
    explicit Exchange(at::Generator given) : host(std::move(given)), saved(host.clone()) {
      host.set_state(generator().get_state());
    }
    ~Exchange() {
      generator().set_state(host.get_state());
      host.set_state(saved.get_state());
    }
  } exchange(host);
  at::native::cpu_fallback(op, stack);
}

// Kernels that torch has for CUDA alone.

using Optional = std::optional<Tensor>;

Tensor with_biases(Tensor gates, const Optional& a, const Optional& b) {
  if (a.has_value() && a->defined()) gates = gates + *a;
  if (b.has_value() && b->defined()) gates = gates + *b;
  return gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& of_input, const Tensor& of_hidden,
                                             const Tensor& cx, const Optional& input_bias,
                                             const Optional& hidden_bias) {
  auto gates = with_biases(of_input + of_hidden, input_bias, hidden_bias).chunk(4, 1);
  auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  auto cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const Optional& by_hy, const Optional& by_cy,
                                                      const Tensor& cx, const Tensor& cy,
                                                      const Tensor& workspace, bool has_bias) {
  auto gates = workspace.chunk(4, 1);
  auto &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
  auto wide = cy.tanh();
  auto dh = by_hy.has_value() && by_hy->defined() ? *by_hy : at::zeros_like(cy);
  auto dc = dh * o * (1 - wide * wide);
  if (by_cy.has_value() && by_cy->defined()) dc = dc + *by_cy;
  auto grad = at::cat({dc * g * i * (1 - i), dc * cx * f * (1 - f), dc * i * (1 - g * g),
                       dh * wide * o * (1 - o)},
                      1);
  return {grad, dc * f, has_bias ? grad.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& of_input, const Tensor& of_hidden,
                                    const Tensor& hx, const Optional& input_bias,
                                    const Optional& hidden_bias) {
  auto x = with_biases(of_input, input_bias, {}).chunk(3, 1);
  auto h = with_biases(of_hidden, hidden_bias, {}).chunk(3, 1);
  auto r = (x[0] + h[0]).sigmoid(), z = (x[1] + h[1]).sigmoid();
  auto n = (x[2] + r * h[2]).tanh();
  return {n + z * (hx - n), at::cat({r, z, n, hx, h[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& by_hy,
                                                                     const Tensor& workspace,
                                                                     bool has_bias) {
  auto kept = workspace.chunk(5, 1);
  auto &r = kept[0], &z = kept[1], &n = kept[2], &hx = kept[3], &h = kept[4];
  auto dn = by_hy * (1 - z) * (1 - n * n);
  auto dr = dn * h * r * (1 - r), dz = by_hy * (hx - n) * z * (1 - z);
  auto by_input = at::cat({dr, dz, dn}, 1), by_hidden = at::cat({dr, dz, dn * r}, 1);
  return {by_input, by_hidden, by_hy * z, has_bias ? by_input.sum(0) : Tensor(),
          has_bias ? by_hidden.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_);
  m.impl("record_stream", record_stream);
  m.impl("view", at::native::view);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

TORCH_LIBRARY(pretend, m) {
  m.def("configure(int seed, int most_delay_us) -> ()", [](int64_t given, int64_t most) {
    seed = static_cast<uint64_t>(given);
    most_delay_us = most;
  });
  m.def("limit(int total) -> ()",
        [](int64_t total) { memory().total = static_cast<size_t>(total); });
  m.def("allocated() -> int", [] { return static_cast<int64_t>(memory().allocated); });
  m.def("peak() -> int", [] { return static_cast<int64_t>(memory().peak); });
  m.def("reset_peak() -> ()", [] { memory().reset_peak(); });
  m.def("reserved() -> int", [] { return memory().reserved(); });
  m.def("total() -> int", [] { return static_cast<int64_t>(memory().total); });
  m.def("empty_cache() -> ()", [] { memory().empty_cache(); });
  m.def("sleep(int us) -> ()", [](int64_t us) {
    current().submit([us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); },
                     true);
  });
  m.def("generator() -> Generator?", [] { return std::optional<at::Generator>(generator()); });
}

struct Register {
  Register() {
    c10::SetAllocator(DeviceType::CUDA, &memory());
  }
} registered;

}  // namespace
