// A device of torch's PrivateUse1 type: two devices whose memory is the host's, each with a
// generator of its own. A copy to the host that need not block is made when it is waited for.
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>
#include <functional>

namespace {
using c10::Device, c10::DeviceIndex, c10::Stream, at::Tensor, std::optional;
using Sizes = c10::IntArrayRef;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKey(c10::DispatchKey::PrivateUse1);
constexpr DeviceIndex kNumDevices = 2;
thread_local DeviceIndex current = 0;
std::vector<std::function<void()>> pending;

void wait() {
  for (auto& copy : std::exchange(pending, {})) copy();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  Device getDevice() const override { return {kDevice, current}; }
  Device exchangeDevice(Device device) const override {
    return {kDevice, std::exchange(current, device.index())};
  }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  void synchronizeDevice(const DeviceIndex) const override { wait(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Allocator final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    void* data = size ? std::malloc(size) : nullptr;
    return {data, data, &std::free, Device(kDevice, current)};
  }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    std::memcpy(to, from, size);
  }
} allocator;
REGISTER_ALLOCATOR(kDevice, &allocator)

// Its state is a seed and a count of draws, as of CUDA's; a number is splitmix64 of both.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex index) : GeneratorImpl({kDevice, index}, kKey) {}
  void set_current_seed(uint64_t seed) override { state[0] = seed, state[1] = 0; }
  void set_offset(uint64_t offset) override { state[1] = offset; }
  uint64_t get_offset() const override { return state[1]; }
  uint64_t current_seed() const override { return state[0]; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state[0];
  }
  void set_state(const c10::TensorImpl& bytes) override {
    std::memcpy(state, bytes.data(), sizeof state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Tensor bytes = at::empty({sizeof state}, at::kByte);
    std::memcpy(bytes.data_ptr(), state, sizeof state);
    return bytes.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    std::memcpy(copy->state, state, sizeof state);
    return copy;
  }
  double uniform() {
    uint64_t word = state[0] + ++state[1] * 0x9E3779B97F4A7C15u;
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9u;
    word = (word ^ word >> 27) * 0x94D049BB133111EBu;
    return static_cast<double>((word ^ word >> 31) >> 11) * 0x1p-53;
  }
  uint64_t state[2] = {0, 0};
};

at::Generator& generator_of(DeviceIndex index) {
  static std::vector<at::Generator> all = {
      at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all.at(index < 0 ? current : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kNumDevices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return generator_of(index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
} hooks;
const bool is_registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

Tensor empty(Sizes sizes, optional<at::ScalarType> dtype, optional<at::Layout>,
             optional<Device> device, optional<bool>, optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(Device(kDevice, current)));
  return at::detail::empty_generic(sizes, &allocator, kKey, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(Sizes sizes, Sizes strides, optional<at::ScalarType> dtype,
                     optional<at::Layout>, optional<Device> device, optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(Device(kDevice, current)));
  const auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_strided_generic(sizes, strides, &allocator, kKey, type);
}

// The same memory as a tensor of the host.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  Tensor host = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto copy = [from, to] { on_host(to).copy_(on_host(from)); };
  pending.emplace_back(copy);
  if (!non_blocking || !to.is_cpu()) wait();
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  wait();
  return on_host(tensor).item();
}

template <class Draw>
Tensor& fill(Tensor& tensor, const optional<at::Generator>& given, Draw draw) {
  at::Generator generator = given.has_value() ? *given : generator_of(tensor.device().index());
  auto* generator_impl = generator.get<Generator>();
  Tensor values = at::empty(tensor.sizes(), at::kDouble);
  auto* begin = values.data_ptr<double>();
  std::generate(begin, begin + values.numel(), [&] { return draw(*generator_impl); });
  return tensor.copy_(values);
}

Tensor& uniform(Tensor& self, double low, double high, optional<at::Generator> given) {
  return fill(self, given, [=](Generator& it) { return low + (high - low) * it.uniform(); });
}

Tensor& bernoulli(Tensor& self, double probability, optional<at::Generator> given) {
  return fill(self, given, [=](Generator& it) { return it.uniform() < probability; });
}

Tensor& normal(Tensor& self, double mean, double deviation, optional<at::Generator> given) {
  return fill(self, given, [=](Generator& it) {
    const double radius = std::sqrt(-2 * std::log1p(-it.uniform()));
    return mean + deviation * radius * std::cos(2 * M_PI * it.uniform());
  });
}

std::tuple<Tensor, Tensor> dropout(const Tensor& input, double probability, optional<bool>) {
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - probability);
  return {at::div(at::mul(input, mask), 1 - probability), mask};
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("uniform_", uniform);
  m.impl("bernoulli_.float", bernoulli);
  m.impl("normal_", normal);
  m.impl("native_dropout", dropout);
}

// Else a tensor with a lazy bit would be resolved by a copy, which would be resolved by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY(simulated, m) {
  m.def("get_rng_state", [](int64_t index) { return generator_of(index).get_state(); });
  m.def("set_rng_state", [](Tensor state, int64_t index) { generator_of(index).set_state(state); });
  m.def("manual_seed", [](int64_t s, int64_t index) { generator_of(index).set_current_seed(s); });
}
}  // namespace
