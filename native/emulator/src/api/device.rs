//! What a GPU is and how it is set.

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlFieldValue_t, nvmlGpuFabricInfo_t, nvmlGpuFabricInfo_v2_t, nvmlGpuFabricInfoV_t,
    nvmlPciInfo_t, nvmlPciInfoExt_v1_t,
};

use super::argument::text_array;
use super::handle::{Device, gpu_at, with_gpu, writable_gpu};
use super::lookup::visible;
use super::{Out, Text, api, check_version};
use crate::code::Code;
use crate::mig;
use crate::model::{ModeRule, Model};
use crate::session::Session;
use crate::state::Gpu;

/// `NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED`.
const FIELD_RESETLESS_MIG: u32 = 184;

/// `NVML_GPU_VIRTUALIZATION_MODE_VGPU`.
const VIRTUALIZATION_MODE_VGPU: u32 = 2;

/// `NVML_GPU_FABRIC_STATE_COMPLETED`.
const FABRIC_COMPLETED: u8 = 3;

/// Cluster, clique and state of the fabric; state 0 where there is none.
fn fabric(gpu: &Gpu) -> ([u8; 16], u32, u8) {
    gpu.clique.map_or(([0; 16], 0, 0), |clique| (clique.cluster.into_bytes(), clique.id, FABRIC_COMPLETED))
}

/// Domain, bus and device of a PCI address.
fn numbers(gpu: &Gpu) -> (u32, u32, u32) {
    let mut parts = gpu.pci.split([':', '.']).map(|part| u32::from_str_radix(part, 16).unwrap_or(0));
    let mut next = || parts.next().unwrap_or(0);
    (next(), next(), next())
}

fn pci(gpu: &Gpu, model: &Model) -> nvmlPciInfo_t {
    let (domain, bus, device) = numbers(gpu);
    nvmlPciInfo_t {
        busIdLegacy: text_array(&gpu.pci.to_uppercase()),
        domain,
        bus,
        device,
        pciDeviceId: model.packed_device_id(),
        pciSubSystemId: model.packed_subsystem_id(),
        busId: text_array(&format!("{domain:08X}:{bus:02X}:{device:02X}.0")),
    }
}

fn pci_info(session: &Session, device: nvmlDevice_t, info: &Out<nvmlPciInfo_t>) -> Result<(), Code> {
    with_gpu(session, device, |gpu, model| info.set(pci(gpu, model)))
}

/// The name of a device; a MIG device's ends with its profile.
fn name(session: &Session, device: nvmlDevice_t) -> Result<String, Code> {
    let device = Device::from_handle(device)?;
    let state = session.state()?;
    let (gpu, model) = gpu_at(&session.machine, &state, device.gpu())?;
    let Device::Mig(of) = device else { return Ok(model.name.clone()) };
    let (instance, compute) = of.find_compute_instance(gpu)?;
    let mig = mig::of(model)?;
    let profile = mig.profile(instance.profile).ok_or(Code::UNKNOWN)?;
    let compute = mig.compute_profile(compute.profile).ok_or(Code::UNKNOWN)?;
    Ok(format!("{} MIG {}", model.name, compute.name(profile)))
}

fn uuid(session: &Session, device: nvmlDevice_t) -> Result<String, Code> {
    let device = Device::from_handle(device)?;
    let state = session.state()?;
    let (gpu, _) = gpu_at(&session.machine, &state, device.gpu())?;
    match device {
        Device::Gpu(_) => Ok(gpu.uuid.clone()),
        Device::Mig(of) => Ok(of.find_compute_instance(gpu)?.1.uuid.clone()),
    }
}

fn set(session: &Session, device: nvmlDevice_t, change: impl FnOnce(&mut Gpu)) -> Result<(), Code> {
    let index = writable_gpu(session, device)?;
    session.machine.change(|state| {
        change(state.gpus.get_mut(index).ok_or(Code::INVALID_ARGUMENT)?);
        Ok(())
    })
}

/// How close two GPUs are: same root complex, same NUMA node, same machine.
fn ancestor(one: &Gpu, other: &Gpu) -> u32 {
    if one.pci == other.pci {
        0
    } else if one.pci_root == other.pci_root {
        30
    } else if one.numa == other.numa {
        40
    } else {
        50
    }
}

api! {
    fn nvmlDeviceGetIndex(device: nvmlDevice_t, index: Out<u32>) |session| {
        let position = Device::from_handle(device)?.gpu();
        with_gpu(session, device, |_, _| {
            let index_seen = visible(session)?.iter().position(|seen| *seen == position).ok_or(Code::INVALID_ARGUMENT)?;
            index.set(u32::try_from(index_seen).map_err(|_| Code::UNKNOWN)?)
        })
    }
    fn nvmlDeviceGetUUID(device: nvmlDevice_t, text: Text, length: u32) |session| {
        text.set(length, &uuid(session, device)?)
    }
    fn nvmlDeviceGetName(device: nvmlDevice_t, text: Text, length: u32) |session| {
        text.set(length, &name(session, device)?)
    }
    fn nvmlDeviceGetBrand(device: nvmlDevice_t, brand: Out<u32>) |session| {
        with_gpu(session, device, |_, model| brand.set(model.brand))
    }
    fn nvmlDeviceGetArchitecture(device: nvmlDevice_t, architecture: Out<u32>) |session| {
        with_gpu(session, device, |_, model| architecture.set(model.architecture))
    }
    fn nvmlDeviceGetCudaComputeCapability(device: nvmlDevice_t, major: Out<i32>, minor: Out<i32>) |session| {
        with_gpu(session, device, |_, model| {
            major.set(model.compute_capability.0)?;
            minor.set(model.compute_capability.1)
        })
    }
    fn nvmlDeviceGetMinorNumber(device: nvmlDevice_t, minor: Out<u32>) |session| {
        with_gpu(session, device, |gpu, _| minor.set(gpu.minor))
    }
    fn nvmlDeviceGetModuleId(device: nvmlDevice_t, module: Out<u32>) |session| {
        with_gpu(session, device, |gpu, _| module.set(gpu.minor + 1))
    }
    fn nvmlDeviceGetSerial(device: nvmlDevice_t, text: Text, length: u32) |session| {
        with_gpu(session, device, |gpu, _| {
            // The board is the hypervisor's.
            if gpu.vgpu { Err(Code::NOT_SUPPORTED) } else { text.set(length, &gpu.serial) }
        })
    }
    fn nvmlDeviceGetVbiosVersion(device: nvmlDevice_t, text: Text, length: u32) |session| {
        with_gpu(session, device, |_, _| text.set(length, "96.00.00.00.00"))
    }
    fn nvmlDeviceGetPciInfo(device: nvmlDevice_t, info: Out<nvmlPciInfo_t>) |session| {
        pci_info(session, device, &info)
    }
    fn nvmlDeviceGetPciInfo_v2(device: nvmlDevice_t, info: Out<nvmlPciInfo_t>) |session| {
        pci_info(session, device, &info)
    }
    fn nvmlDeviceGetPciInfo_v3(device: nvmlDevice_t, info: Out<nvmlPciInfo_t>) |session| {
        pci_info(session, device, &info)
    }
    fn nvmlDeviceGetPciInfoExt(device: nvmlDevice_t, info: Out<nvmlPciInfoExt_v1_t>) |session| {
        let version = info.cast::<u32>().get()?;
        check_version::<nvmlPciInfoExt_v1_t>(version, 1)?;
        with_gpu(session, device, |gpu, model| {
            let plain = pci(gpu, model);
            info.set(nvmlPciInfoExt_v1_t {
                version,
                domain: plain.domain,
                bus: plain.bus,
                device: plain.device,
                pciDeviceId: plain.pciDeviceId,
                pciSubSystemId: plain.pciSubSystemId,
                baseClass: 3,
                subClass: 2,
                busId: plain.busId,
            })
        })
    }
    fn nvmlDeviceGetVirtualizationMode(device: nvmlDevice_t, mode: Out<u32>) |session| {
        with_gpu(session, device, |gpu, _| mode.set(if gpu.vgpu { VIRTUALIZATION_MODE_VGPU } else { 0 }))
    }
    fn nvmlDeviceGetGpuFabricInfo(device: nvmlDevice_t, info: Out<nvmlGpuFabricInfo_t>) |session| {
        with_gpu(session, device, |gpu, _| {
            let (cluster, clique, state) = fabric(gpu);
            info.set(nvmlGpuFabricInfo_t { clusterUuid: cluster, status: 0, cliqueId: clique, state })
        })
    }
    fn nvmlDeviceGetGpuFabricInfoV(device: nvmlDevice_t, info: Out<nvmlGpuFabricInfoV_t>) |session| {
        let version = info.cast::<u32>().get()?;
        if version >> 24 == 2 {
            check_version::<nvmlGpuFabricInfo_v2_t>(version, 2)?;
            with_gpu(session, device, |gpu, _| {
                let (cluster, clique, state) = fabric(gpu);
                info.cast().set(nvmlGpuFabricInfo_v2_t {
                    version, clusterUuid: cluster, status: 0, cliqueId: clique, state, healthMask: 0,
                })
            })
        } else {
            check_version::<nvmlGpuFabricInfoV_t>(version, 3)?;
            with_gpu(session, device, |gpu, _| {
                let (cluster, clique, state) = fabric(gpu);
                info.set(nvmlGpuFabricInfoV_t {
                    version, clusterUuid: cluster, status: 0, cliqueId: clique, state, healthMask: 0, healthSummary: 0,
                })
            })
        }
    }
    fn nvmlDeviceGetNvLinkState(device: nvmlDevice_t, link: u32, active: Out<u32>) |session| {
        with_gpu(session, device, |gpu, model| {
            if model.nvlinks == 0 || gpu.vgpu {
                return Err(Code::NOT_SUPPORTED);
            }
            if link >= model.nvlinks {
                return Err(Code::INVALID_ARGUMENT);
            }
            // An Ampere GPU in MIG mode has its links down.
            let down = gpu.mig_current && model.mig.as_ref().is_some_and(|mig| mig.mode == ModeRule::NeedsReset);
            active.set(u32::from(!down && link < gpu.nvlinks))
        })
    }
    fn nvmlDeviceGetPersistenceMode(device: nvmlDevice_t, mode: Out<u32>) |session| {
        with_gpu(session, device, |gpu, _| mode.set(u32::from(gpu.persistence)))
    }
    fn nvmlDeviceSetPersistenceMode(device: nvmlDevice_t, mode: u32) |session| {
        if mode > 1 {
            return Err(Code::INVALID_ARGUMENT);
        }
        set(session, device, |gpu| gpu.persistence = mode == 1)
    }
    fn nvmlDeviceGetComputeMode(device: nvmlDevice_t, mode: Out<u32>) |session| {
        with_gpu(session, device, |gpu, _| mode.set(gpu.compute_mode))
    }
    fn nvmlDeviceSetComputeMode(device: nvmlDevice_t, mode: u32) |session| {
        if mode > 3 {
            return Err(Code::INVALID_ARGUMENT);
        }
        set(session, device, |gpu| gpu.compute_mode = mode)
    }
    fn nvmlDeviceGetNumaNodeId(device: nvmlDevice_t, node: Out<u32>) |session| {
        with_gpu(session, device, |gpu, _| node.set(u32::try_from(gpu.numa).map_err(|_| Code::NOT_SUPPORTED)?))
    }
    fn nvmlDeviceGetTopologyCommonAncestor(one: nvmlDevice_t, other: nvmlDevice_t, level: Out<u32>) |session| {
        with_gpu(session, one, |one, _| with_gpu(session, other, |other, _| level.set(ancestor(one, other))))
    }
    fn nvmlDeviceGetTemperature(device: nvmlDevice_t, sensor: u32, celsius: Out<u32>) |session| {
        if sensor != 0 {
            return Err(Code::INVALID_ARGUMENT);
        }
        with_gpu(session, device, |gpu, _| celsius.set(28 + gpu.minor % 8))
    }
    fn nvmlDeviceGetPowerUsage(device: nvmlDevice_t, milliwatts: Out<u32>) |session| {
        with_gpu(session, device, |gpu, model| milliwatts.set(model.power_limit_w * 100 + gpu.minor % 8 * 350))
    }
    fn nvmlDeviceGetPowerManagementLimit(device: nvmlDevice_t, milliwatts: Out<u32>) |session| {
        with_gpu(session, device, |_, model| milliwatts.set(model.power_limit_w * 1000))
    }
    fn nvmlDeviceGetEnforcedPowerLimit(device: nvmlDevice_t, milliwatts: Out<u32>) |session| {
        with_gpu(session, device, |_, model| milliwatts.set(model.power_limit_w * 1000))
    }
    fn nvmlDeviceGetClockInfo(device: nvmlDevice_t, clock: u32, megahertz: Out<u32>) |session| {
        let idle = [210, 210, 1215, 585].get(usize::try_from(clock).unwrap_or(usize::MAX)).copied();
        with_gpu(session, device, |_, _| megahertz.set(idle.ok_or(Code::INVALID_ARGUMENT)?))
    }
    fn nvmlDeviceGetPerformanceState(device: nvmlDevice_t, state: Out<u32>) |session| {
        with_gpu(session, device, |_, _| state.set(0))
    }
    fn nvmlDeviceGetEccMode(device: nvmlDevice_t, current: Out<u32>, pending: Out<u32>) |session| {
        with_gpu(session, device, |gpu, _| {
            let on = u32::from(gpu.ecc.ok_or(Code::NOT_SUPPORTED)?);
            current.set(on)?;
            pending.set(on)
        })
    }
    fn nvmlDeviceGetRemappedRows(
        device: nvmlDevice_t, correctable: Out<u32>, uncorrectable: Out<u32>, pending: Out<u32>, failed: Out<u32>,
    ) |session| {
        with_gpu(session, device, |_, _| [correctable, uncorrectable, pending, failed].iter().try_for_each(|out| out.set(0)))
    }
    fn nvmlDeviceGetFieldValues(device: nvmlDevice_t, count: i32, values: Out<nvmlFieldValue_t>) |session| {
        with_gpu(session, device, |_, model| {
            let live = model.mig.as_ref().is_some_and(|mig| mig.mode == ModeRule::Live);
            for index in 0..usize::try_from(count).map_err(|_| Code::INVALID_ARGUMENT)? {
                let place = values.at(index);
                let mut value = place.get()?;
                value.nvmlReturn = Code::NOT_SUPPORTED.number();
                if value.fieldId == FIELD_RESETLESS_MIG {
                    value.nvmlReturn = 0;
                    value.valueType = 1;
                    value.value.uiVal = u32::from(live);
                }
                place.set(value)?;
            }
            Ok(())
        })
    }
}
