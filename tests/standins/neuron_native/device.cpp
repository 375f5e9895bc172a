// A device of torch's own (PrivateUse1) on the host's memory, which runs every operation by the CPU's kernel. It stands
// in for a NeuronCore: tensors of another device, autograd, autocast, generators, and operations that mix devices fail.

#include <atomic>
#include <mutex>
#include <set>
#include <string>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace {

constexpr c10::DeviceType kNeuron = c10::DeviceType::PrivateUse1;
c10::DeviceIndex device_count = 1;
thread_local c10::DeviceIndex current_device = 0;
//: Whether random numbers come from the CPU's generator; otherwise from the device's own.
std::atomic<bool> draws_on_host{false};

// ---- memory

std::atomic<int64_t> allocated{0}, most_allocated{0};

struct Block {
  void* data;
  size_t size;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated -= static_cast<int64_t>(block->size);
  c10::free_cpu(block->data);
  delete block;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* block = new Block{c10::alloc_cpu(size), size};
    const int64_t now = allocated += static_cast<int64_t>(size);
    int64_t most = most_allocated;
    while (now > most && !most_allocated.compare_exchange_weak(most, now)) {
    }
    return {block->data, block, free_block, c10::Device(kNeuron, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};

Allocator allocator;
REGISTER_ALLOCATOR(kNeuron, &allocator);

// ---- devices and generators

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNeuron; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kNeuron, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count, "no device ", device, ": there are ", static_cast<int>(device_count));
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) : CPUGeneratorImpl() {
    device_ = c10::Device(kNeuron, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

at::Generator& default_generator(c10::DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex i = 0; i < device_count; ++i) made.push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all.at(index < 0 ? current_device : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return at::make_generator<Generator>(index); }
  bool isPinnedPtr(const void*) const override { return false; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    at::native::resize_bytes_nocuda(storage, size);
  }
};
Hooks hooks;
const bool has_hooks = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// ---- operations

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::Device(kNeuron, device && device->has_index() ? device->index() : current_device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::Device(kNeuron, device && device->has_index() ? device->index() : current_device));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// The same memory, as the CPU sees it.
at::Tensor on_host(const at::Tensor& x) {
  if (!x.defined() || !x.is_privateuseone()) return x;
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU).requires_grad(false));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  at::native::checkSetStorage(
      self, std::move(storage), offset.guard_int(__FILE__, __LINE__), C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride));
  self.unsafeGetTensorImpl()->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

std::mutex called_lock;
std::set<std::string> called;

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  {
    const std::lock_guard<std::mutex> held(called_lock);
    called.insert(op.schema().operator_name().name);
  }
  // Random numbers of the device: the CPU's kernel draws from the CPU's generator, which stands in for it.
  if (op.hasTag(at::Tag::nondeterministic_seeded) && !draws_on_host) {
    auto host = at::detail::getDefaultCPUGenerator();
    auto& device = default_generator(-1);
    const auto before = host.get_state();
    host.set_state(device.get_state());
    at::native::cpu_fallback(op, stack);
    device.set_state(host.get_state());
    host.set_state(before);
    return;
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

}  // namespace

namespace at::autocast {
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32)
  KERNEL_PRIVATEUSEONE(log_softmax, int, fp32)
}
}  // namespace at::autocast

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", [](int count, bool on_host) {
    device_count = static_cast<c10::DeviceIndex>(count);
    draws_on_host = on_host;
  });
  m.def("current_device", [] { return static_cast<int>(current_device); });
  m.def("set_device", [](int index) { Guard().setDevice({kNeuron, static_cast<c10::DeviceIndex>(index)}); });
  m.def("seed", [](int index, uint64_t seed) { default_generator(static_cast<c10::DeviceIndex>(index)).set_current_seed(seed); });
  m.def("get_state", [](int index) { return default_generator(static_cast<c10::DeviceIndex>(index)).get_state(); });
  m.def("set_state", [](int index, const at::Tensor& state) {
    default_generator(static_cast<c10::DeviceIndex>(index)).set_state(state);
  });
  m.def("memory", [] { return std::make_pair(allocated.load(), most_allocated.load()); });
  m.def("reset_peak", [] { most_allocated = allocated.load(); });
  m.def("called", [] {
    const std::lock_guard<std::mutex> held(called_lock);
    return called;
  });
  m.def("forget_called", [] {
    const std::lock_guard<std::mutex> held(called_lock);
    called.clear();
  });
  m.def("on_host", on_host);
}
