//! What a GPU tells of its board: ECC, NVLinks, serial number, and whether it
//! is a vGPU.

use kerf_emulator::code::Code;
use kerf_emulator::model;
use nvml_wrapper_sys::bindings::{nvmlGpuFabricInfo_v2_t, nvmlGpuFabricInfoV_t};

use crate::support::{Lab, Raw, nvml};

const CLUSTER: &str = "6f9619ff-8b86-d011-b42d-00cf4fc964ff";

fn ecc(raw: &Raw, gpu: u32) -> Result<(u32, u32), u32> {
    let (mut current, mut pending) = (9, 9);
    nvml!(raw, nvmlDeviceGetEccMode(raw.gpu(gpu), &raw mut current, &raw mut pending))?;
    Ok((current, pending))
}

/// The states of all links; the error of the first where there is none.
fn links(raw: &Raw, gpu: u32) -> Result<Vec<u32>, u32> {
    let state = |link| -> Result<u32, u32> {
        let mut active = 9;
        nvml!(raw, nvmlDeviceGetNvLinkState(raw.gpu(gpu), link, &raw mut active))?;
        Ok(active)
    };
    state(0)?;
    Ok((0..).map_while(|link| state(link).ok()).collect())
}

/// Cluster, clique and state of the fabric.
fn fabric(raw: &Raw, gpu: u32) -> ([u8; 16], u32, u8) {
    let mut info = nvmlGpuFabricInfoV_t {
        version: u32::try_from(size_of::<nvmlGpuFabricInfo_v2_t>()).unwrap() | 2 << 24,
        clusterUuid: [9; 16],
        status: 9,
        cliqueId: 9,
        state: 9,
        healthMask: 9,
        healthSummary: 9,
    };
    nvml!(raw, nvmlDeviceGetGpuFabricInfoV(raw.gpu(gpu), &raw mut info)).unwrap();
    assert_eq!((info.status, info.healthSummary), (0, 9), "a struct of the second version has no summary");
    (info.clusterUuid, info.cliqueId, info.state)
}

#[test]
fn every_model_answers_its_ecc_and_its_links_or_that_it_has_none() {
    let models = model::built_in().unwrap();
    let lab = Lab::new(&models.keys().map(String::as_str).collect::<Vec<_>>());
    let raw = lab.raw();
    for (index, (key, model)) in (0..).zip(&models) {
        let expected = model.ecc.map(|on| (u32::from(on), u32::from(on)));
        assert_eq!(ecc(&raw, index), expected.ok_or(Code::NOT_SUPPORTED.number()), "{key}");
        let expected = match model.nvlinks {
            0 => Err(Code::NOT_SUPPORTED.number()),
            count => Ok(vec![1; usize::try_from(count).unwrap()]),
        };
        assert_eq!(links(&raw, index), expected, "{key}");
        assert_eq!(fabric(&raw, index), ([0; 16], 0, 0), "{key}");
    }
}

#[test]
fn a_board_can_be_set_otherwise() {
    let clique = format!("gb200:clique={CLUSTER}.7");
    let lab = Lab::new(&["a30:ecc=off,nvlinks=0", &clique, "a100-40:mig=on", "h100-80:mig=on"]);
    let raw = lab.raw();
    assert_eq!((ecc(&raw, 0), links(&raw, 0)), (Ok((0, 0)), Ok(vec![0; 4])));
    assert_eq!(fabric(&raw, 1), (*uuid::Uuid::parse_str(CLUSTER).unwrap().as_bytes(), 7, 3));
    assert_eq!(links(&raw, 2), Ok(vec![0; 12]), "in MIG mode Ampere's links are down");
    assert_eq!(links(&raw, 3), Ok(vec![1; 18]));
    let refused = |gpu: &str| lab.refused(&["init", "--force", "--gpu", gpu]);
    assert!(refused("l4:nvlinks=1").contains("l4 has 0 NVLinks"));
    assert!(refused("l4:clique=7").contains("clique=<cluster UUID>.<clique>"));
}

#[test]
fn a_vgpu_leaves_its_mode_and_gpu_instances_to_the_hypervisor() {
    let lab = Lab::new(&["h100-80:vgpu=on,mig=on", "l4"]);
    let raw = lab.raw();
    let mode = |gpu| {
        let mut mode = 9;
        nvml!(raw, nvmlDeviceGetVirtualizationMode(raw.gpu(gpu), &raw mut mode)).unwrap();
        mode
    };
    assert_eq!((mode(0), mode(1)), (2, 0));
    let not_supported = Err(Code::NOT_SUPPORTED.number());
    let (mut activation, mut instance) = (0, std::ptr::null_mut());
    assert_eq!(nvml!(raw, nvmlDeviceSetMigMode(raw.gpu(0), 0, &raw mut activation)), not_supported);
    assert_eq!(nvml!(raw, nvmlDeviceCreateGpuInstance(raw.gpu(0), 19, &raw mut instance)), not_supported);
    lab.control(&["mig", "create", "--gpu", "0", "--profile", "1g.10gb"]);
    let mut count = 1;
    nvml!(raw, nvmlDeviceGetGpuInstances(raw.gpu(0), 19, &raw mut instance, &raw mut count)).unwrap();
    assert_eq!(nvml!(raw, nvmlGpuInstanceDestroy(instance)), not_supported);
    let mut serial = [0; 30];
    assert_eq!(nvml!(raw, nvmlDeviceGetSerial(raw.gpu(0), serial.as_mut_ptr(), 30)), not_supported);
    assert_eq!(links(&raw, 0), Err(Code::NOT_SUPPORTED.number()));
}
