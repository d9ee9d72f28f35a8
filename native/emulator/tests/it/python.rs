//! A client that is not ours: NVIDIA's own Python binding.

use std::path::PathBuf;
use std::process::Command;

use crate::support::{Lab, text};

/// A Python with `nvidia-ml-py`, made under the target folder once; none where
/// it cannot be had.
fn python() -> Result<PathBuf, String> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("nvidia-ml-py");
    let python = folder.join("bin/python");
    let has = |python: &PathBuf| {
        Command::new(python)
            .args(["-c", "import pynvml"])
            .output()
            .is_ok_and(|output| output.status.success())
    };
    if has(&python) {
        return Ok(python);
    }
    let run = |program: &str, arguments: &[&str]| match Command::new(program).args(arguments).output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => Err(format!("{program}: {error}")),
    };
    let folder = folder.to_str().ok_or("the target folder's name is not text")?;
    run("python3", &["-m", "venv", folder])?;
    run(&format!("{folder}/bin/pip"), &["install", "-q", "--disable-pip-version-check", "nvidia-ml-py"])?;
    Ok(python)
}

const SCRIPT: &str = r#"
from pynvml import *
nvmlInit()
print(nvmlSystemGetDriverVersion(), nvmlDeviceGetCount())
gpu = nvmlDeviceGetHandleByIndex(0)
print(nvmlDeviceGetName(gpu), nvmlDeviceGetMigMode(gpu), nvmlDeviceGetMemoryInfo(gpu, version=nvmlMemory_v2).total >> 20)
print(nvmlDeviceSetMigMode(gpu, NVML_DEVICE_MIG_ENABLE))
found = []
for number in range(NVML_GPU_INSTANCE_PROFILE_COUNT):
    try:
        info = nvmlDeviceGetGpuInstanceProfileInfo(gpu, number, version=2)
        found.append(f"{info.name}={info.id}")
    except NVMLError_NotSupported:
        pass
print(" ".join(found).replace("MIG ", ""))
instance = nvmlDeviceCreateGpuInstance(gpu, 9)
compute = nvmlGpuInstanceCreateComputeInstance(instance, 2)
mig = nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
attributes = nvmlDeviceGetAttributes_v2(mig)
print(nvmlDeviceGetName(mig), nvmlDeviceGetUUID(mig)[:4], nvmlDeviceGetGpuInstanceId(mig), attributes.multiprocessorCount, attributes.memorySizeMB)
try:
    nvmlGpuInstanceDestroy(instance)
except NVMLError_InUse as error:
    print(error)
nvmlComputeInstanceDestroy(compute)
nvmlGpuInstanceDestroy(instance)
print(nvmlDeviceGetComputeRunningProcesses(gpu))
nvmlShutdown()
"#;

#[test]
fn the_python_binding_makes_and_destroys_a_partition() {
    let python = match python() {
        Ok(python) => python,
        Err(reason) => return println!("not run, nvidia-ml-py cannot be had: {reason}"),
    };
    let lab = Lab::new(&["h100-80"]);
    let folder = lab.library().parent().unwrap().to_owned();
    let output = Command::new(python).args(["-c", SCRIPT]).env("LD_LIBRARY_PATH", folder).output().unwrap();
    let expected = "580.95.05 1\nNVIDIA H100 80GB HBM3 [0, 0] 81559\n0\n\
        1g.10gb=19 2g.20gb=14 3g.40gb=9 4g.40gb=5 7g.80gb=0 1g.10gb+me=20 1g.20gb=15\n\
        NVIDIA H100 80GB HBM3 MIG 3g.40gb MIG- 1 60 40448\nIn use by another client\n[]\n";
    assert_eq!(text(&output), expected, "{}", String::from_utf8_lossy(&output.stderr));
}
