// CUDA for a CPU build of PyTorch, in functions that do nothing: fake tensors on "cuda" then have autograd, streams and dynamo.
// build.py compiles it; LD_PRELOAD loads it. No kernel exists, so no tensor on "cuda" can have memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);
const c10::Stream kStream(c10::Stream::DEFAULT, kDevice);

// Autograd asks it for the stream of each node.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return kStream; }
  c10::Stream getNewStream(c10::Device, int = 0) const override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return kStream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new Guard());

}  // namespace

namespace at {

// The autograd engine asks it whether there is an accelerator, and how many devices need a thread.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void*) const override { return false; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const Generator& getDefaultGenerator(DeviceIndex = -1) const override { return detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex = -1) const override { return detail::createCPUGenerator(); }
  void deviceSynchronize(DeviceIndex) const override {}
};
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at

// A CPU build answers at compile time that there is none. LD_PRELOAD puts this definition before that of libtorch_cpu.
namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
}  // namespace at::accelerator
