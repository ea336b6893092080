// A device guard and hooks for CUDA that do nothing: with them torch believes in one GPU.
//
// FakeTensors on it then have `is_cuda`, autograd runs in a thread of the device, and
// autocast("cuda") is in force. For torch without CUDA; loaded by fake_gpu.py before torch is.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceType kCuda = c10::DeviceType::CUDA;

struct Guard : c10::impl::NoOpDeviceGuardImpl<kCuda> {
  c10::Device exchangeDevice(c10::Device) const override { return {kCuda, 0}; }
  c10::Device getDevice() const override { return {kCuda, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}

 private:
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, {kCuda, 0}); }
};

Guard guard;

}  // namespace

namespace at {

// torch looks for this name.
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks() = default;
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
  // Which operators torch chooses depends on the libraries.
  bool hasCuSOLVER() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool hasCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91900; }
  long versionRuntimeCuDNN() const override { return 91900; }
  long versionCuDNNFrontend() const override { return 11200; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  double batchnormMinEpsilonCuDNN() const override { return 1e-5; }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

extern "C" void install() {
  c10::impl::device_guard_impl_registry[static_cast<int>(kCuda)].store(&guard);
}
