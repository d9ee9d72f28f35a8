//! Versions and processes of the system.

use super::{Out, Text, api};
use crate::code::Code;

api! {
    fn nvmlSystemGetDriverVersion(version: Text, length: u32) |session| {
        version.set(length, &session.state()?.driver_version)
    }
    fn nvmlSystemGetNVMLVersion(version: Text, length: u32) |session| {
        let state = session.state()?;
        version.set(length, &format!("{}.{}", state.cuda_version / 1000, state.driver_version))
    }
    fn nvmlSystemGetCudaDriverVersion(version: Out<i32>) |session| {
        version.set(session.state()?.cuda_version)
    }
    fn nvmlSystemGetCudaDriverVersion_v2(version: Out<i32>) |session| {
        version.set(session.state()?.cuda_version)
    }
    fn nvmlSystemGetProcessName(pid: u32, name: Text, length: u32) |_session| {
        let path = std::fs::read_to_string(format!("/proc/{pid}/comm")).map_err(|_| Code::NOT_FOUND)?;
        name.set(length, path.trim_end())
    }
}
