// A CUDA device of which torch can ask which one is current and how many there are, and nothing else. Preloaded into a
// CPU build: autograd, indexing and fake tensors then take device="cuda".
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace at {

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>)

struct OneDevice : CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

namespace detail {
// Takes the place of libtorch_cpu's own.
const CUDAHooksInterface& getCUDAHooks() {
  static OneDevice device;
  return device;
}
}  // namespace detail

}  // namespace at
