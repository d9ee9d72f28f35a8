//! Events reach waiters, whoever caused them.

use std::time::Duration;

use nvml_wrapper_sys::bindings::{nvmlEventData_t, nvmlEventSet_t};

use crate::support::{GENEROUS, Lab, Raw, nvml};

fn watch(raw: &Raw, types: u64) -> nvmlEventSet_t {
    let mut set = std::ptr::null_mut();
    nvml!(raw, nvmlEventSetCreate(&raw mut set)).unwrap();
    let gpu = raw.gpu(0);
    nvml!(raw, nvmlDeviceRegisterEvents(gpu, types, set)).unwrap();
    set
}

fn wait(raw: &Raw, set: nvmlEventSet_t, timeout: Duration) -> Result<(u64, u64), u32> {
    // SAFETY: a plain C struct.
    let mut data: nvmlEventData_t = unsafe { std::mem::zeroed() };
    let timeout = u32::try_from(timeout.as_millis()).unwrap();
    nvml!(raw, nvmlEventSetWait_v2(set, &raw mut data, timeout))?;
    Ok((data.eventType, data.eventData))
}

#[test]
fn another_process_wakes_a_waiter_and_nothing_is_delivered_twice() {
    let lab = Lab::new(&["h100-80:mig=on", "h100-80"]);
    let raw = lab.raw();
    let set = watch(&raw, 8 | 256);
    assert_eq!(wait(&raw, set, Duration::ZERO), Err(10));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            lab.control(&["xid", "--gpu", "1", "13"]);
            lab.control(&["xid", "--gpu", "0", "48"]);
            lab.control(&["mig", "create", "--gpu", "0", "--profile", "1g.10gb", "--no-ci"]);
        });
        assert_eq!(wait(&raw, set, GENEROUS), Ok((8, 48)));
        assert_eq!(wait(&raw, set, GENEROUS), Ok((256, 0)));
    });
    assert_eq!(wait(&raw, set, Duration::from_millis(30)), Err(10));
}

#[test]
fn a_watched_gpu_keeps_its_mode_until_the_set_is_freed() {
    let lab = Lab::new(&["h100-80"]);
    let raw = lab.raw();
    let set = watch(&raw, 8);
    assert_eq!(lab.control(&["mig", "mode", "--gpu", "0", "on"]), "pending: IN_USE");
    nvml!(raw, nvmlEventSetFree(set)).unwrap();
    assert_eq!(lab.control(&["mig", "mode", "--gpu", "0", "on"]), "active");
}

#[test]
fn a_type_the_gpu_cannot_report_is_refused() {
    let lab = Lab::new(&["l4"]);
    let raw = lab.raw();
    let set = watch(&raw, 8);
    let gpu = raw.gpu(0);
    assert_eq!(nvml!(raw, nvmlDeviceRegisterEvents(gpu, 256, set)), Err(3));
}

#[test]
fn what_came_before_a_gpu_was_watched_is_not_delivered() {
    let lab = Lab::new(&["h100-80", "h100-80"]);
    let raw = lab.raw();
    let set = watch(&raw, 8);
    lab.control(&["xid", "--gpu", "1", "13"]);
    let second = raw.gpu(1);
    nvml!(raw, nvmlDeviceRegisterEvents(second, 8, set)).unwrap();
    lab.control(&["xid", "--gpu", "1", "31", "--instance", "7", "--compute", "0"]);
    assert_eq!(wait(&raw, set, GENEROUS), Ok((8, 31)));
}
