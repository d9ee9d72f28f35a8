//! The kubelet's `PodResources` socket, as a test wants it to answer.

use std::io;
use std::path::Path;

use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

use crate::proto::podresources as wire;
use crate::proto::podresources::pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer};

/// A kubelet whose pods use these claims, and what happens while it is asked.
struct Kubelet(Vec<String>, Box<dyn Fn() + Send + Sync>);

#[tonic::async_trait]
impl PodResourcesLister for Kubelet {
    async fn list(
        &self,
        _: Request<wire::ListPodResourcesRequest>,
    ) -> Result<Response<wire::ListPodResourcesResponse>, Status> {
        self.1();
        let dynamic_resources = self
            .0
            .iter()
            .map(|name| wire::DynamicResource {
                claim_name: name.clone(),
                claim_namespace: "ns".to_owned(),
                claim_resources: vec![wire::ClaimResource {
                    driver_name: "gpu.nvidia.com".to_owned(),
                    ..wire::ClaimResource::default()
                }],
            })
            .collect();
        let containers = vec![wire::ContainerResources {
            name: "main".to_owned(),
            dynamic_resources,
            ..wire::ContainerResources::default()
        }];
        let pod = wire::PodResources { containers, ..wire::PodResources::default() };
        Ok(Response::new(wire::ListPodResourcesResponse { pod_resources: vec![pod] }))
    }
}

/// Serves the socket of a kubelet whose pods use these claims of namespace
/// `ns`.
///
/// # Errors
/// The socket cannot be made.
pub fn pod_resources(
    socket: &Path,
    used: &[&str],
    meanwhile: impl Fn() + Send + Sync + 'static,
) -> io::Result<JoinHandle<Result<(), tonic::transport::Error>>> {
    let listener = UnixListener::bind(socket)?;
    let used = used.iter().map(|name| (*name).to_owned()).collect();
    let service = PodResourcesListerServer::new(Kubelet(used, Box::new(meanwhile)));
    let server = tonic::transport::Server::builder().add_service(service);
    Ok(tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener))))
}
