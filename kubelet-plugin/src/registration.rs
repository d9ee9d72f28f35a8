//! How the kubelet gets to know the plugin: a socket in its registry folder.
//!
//! `GetInfo` is answered from memory, for the kubelet waits a second at most.
//! The socket is made anew when the kubelet does not register within 30 s, and
//! when somebody removes it.

use std::path::PathBuf;

use tokio::sync::watch;
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use crate::proto::registration as wire;

/// What the kubelet calls this kind of plugin.
const PLUGIN_TYPE: &str = "DRAPlugin";

/// The services, as the kubelet names them. Of either kind it takes one that it
/// knows: of plugins the first in this list.
pub(crate) const VERSIONS: [&str; 4] =
    ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"];

/// Whether the kubelet knows the plugin.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Registration {
    /// It has not said anything yet, or the socket was made anew.
    #[default]
    Waiting,
    /// It does.
    Registered,
    /// It refused, with its reason. It tries again by itself.
    Refused(String),
    /// A socket cannot be made, for this reason. It is tried again.
    Unserved(String),
}

/// The registration service.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) driver: String,
    pub(crate) endpoint: PathBuf,
    pub(crate) state: watch::Sender<Registration>,
}

#[tonic::async_trait]
impl wire::registration_server::Registration for Service {
    async fn get_info(&self, _: Request<wire::InfoRequest>) -> Result<Response<wire::PluginInfo>, Status> {
        Ok(Response::new(wire::PluginInfo {
            r#type: PLUGIN_TYPE.to_owned(),
            name: self.driver.clone(),
            endpoint: self.endpoint.display().to_string(),
            supported_versions: VERSIONS.map(str::to_owned).to_vec(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<wire::RegistrationStatus>,
    ) -> Result<Response<wire::RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        if status.plugin_registered {
            info!("registered with the kubelet");
            self.state.send_replace(Registration::Registered);
        } else {
            warn!(error = status.error, "the kubelet refused the registration");
            self.state.send_replace(Registration::Refused(status.error));
        }
        Ok(Response::new(wire::RegistrationStatusResponse {}))
    }
}
