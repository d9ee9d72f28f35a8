//! Plain numbers of a board that only a record of it needs.

use nvml_wrapper_sys::bindings as sys;

use super::failure::Failure;
use super::gpu::{Gpu, pci_info_of};
use super::session::{check, symbol};

/// Numbers as NVML gives them, without names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoardNumbers {
    /// PCI device and vendor id, packed.
    pub device_id: u32,
    /// PCI subsystem id and its vendor's, packed.
    pub subsystem_id: u32,
    /// `NVML_DEVICE_ARCH_*`.
    pub architecture: u32,
    /// `NVML_BRAND_*`.
    pub brand: u32,
    /// The power limit in watts; absent where the board has none.
    pub power_limit_w: Option<u32>,
    /// Most MIG devices; 0 where the board has no MIG or it is off.
    pub max_mig_devices: u32,
}

type Number = unsafe extern "C" fn(sys::nvmlDevice_t, *mut u32) -> sys::nvmlReturn_t;

impl Gpu<'_> {
    /// The board's numbers.
    pub(crate) fn board_numbers(&self) -> Result<BoardNumbers, Failure> {
        let lib = self.session.lib();
        let pci = pci_info_of(self.session, self.handle())?;
        let power = self.number("nvmlDeviceGetPowerManagementLimit", &lib.nvmlDeviceGetPowerManagementLimit);
        Ok(BoardNumbers {
            device_id: pci.pciDeviceId,
            subsystem_id: pci.pciSubSystemId,
            architecture: self.number("nvmlDeviceGetArchitecture", &lib.nvmlDeviceGetArchitecture)?,
            brand: self.number("nvmlDeviceGetBrand", &lib.nvmlDeviceGetBrand)?,
            power_limit_w: power.ok().map(|milliwatts| milliwatts / 1000),
            max_mig_devices: self
                .number("nvmlDeviceGetMaxMigDeviceCount", &lib.nvmlDeviceGetMaxMigDeviceCount)
                .unwrap_or(0),
        })
    }

    pub(super) fn number(
        &self,
        name: &'static str,
        found: &Result<Number, libloading::Error>,
    ) -> Result<u32, Failure> {
        let call = symbol(found, name)?;
        let mut number = 0;
        // SAFETY: `number` is writable; the handle is of this library.
        check(name, unsafe { call(self.handle(), &raw mut number) })?;
        Ok(number)
    }
}
