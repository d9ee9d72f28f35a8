//! A port of this machine by which a driver process reaches the API server, with
//! whatever trouble there is on the [`Way`].

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use axum::Router;
use axum::extract::Request;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use kube::Client;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::fault::Way;

/// The port, and a kubeconfig that leads there.
#[derive(Debug)]
pub(crate) struct Tunnel {
    pub(crate) kubeconfig: PathBuf,
    pub(crate) way: Arc<Way>,
    serving: JoinHandle<()>,
}

impl Tunnel {
    pub(crate) async fn open(client: Client) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("no port is free")?;
        let port = listener.local_addr()?.port();
        let secret = secret()?;
        let path =
            std::env::temp_dir().join(format!("dra-conformance-{}-{port}.kubeconfig", std::process::id()));
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let mut file = file.with_context(|| format!("{} cannot be made", path.display()))?;
        // JSON is YAML too. Not HTTPS: it is the machine's own, and who does not
        // know the path is nobody. Go clients send no token without HTTPS.
        let name = "conformance";
        let kubeconfig = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "clusters": [{"name": name, "cluster": {"server": format!("http://127.0.0.1:{port}/{secret}")}}],
            "users": [{"name": name, "user": {}}],
        });
        file.write_all(kubeconfig.to_string().as_bytes())?;
        let way = Arc::new(Way::new(client));
        let passed = way.clone();
        let prefix = format!("/{secret}/");
        let router = Router::new().fallback(move |request| {
            let (way, prefix) = (passed.clone(), prefix.clone());
            async move { pass(&way, &prefix, request).await }
        });
        let serving = tokio::spawn(async move {
            let _ = axum::serve(listener, router).await;
        });
        Ok(Self { kubeconfig: path, way, serving })
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.serving.abort();
        let _ = std::fs::remove_file(&self.kubeconfig);
    }
}

/// So that other users of the machine do not have what the tool may do.
fn secret() -> Result<String> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes).context("no random bytes")?;
    Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
}

async fn pass(way: &Way, prefix: &str, mut request: Request) -> Response {
    let path = request.uri().path_and_query().map_or("", |path| path.as_str());
    match path.strip_prefix(prefix).and_then(|rest| format!("/{rest}").parse::<Uri>().ok()) {
        Some(uri) => {
            *request.uri_mut() = uri;
            way.serve(request).await
        }
        None => StatusCode::UNAUTHORIZED.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use kube::config::Kubeconfig;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;

    async fn get(port: u16, path: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.expect("a connection");
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: a\r\nAuthorization: b\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("an answer");
        answer
    }

    #[tokio::test]
    async fn who_has_the_kubeconfig_is_let_through_and_nobody_else() {
        let echo = Router::new().fallback(|request: Request| async move {
            format!("{} {:?}", request.uri(), request.headers().get("authorization"))
        });
        let tunnel = Tunnel::open(Client::new(echo, "default")).await.expect("a tunnel");
        let mode = std::fs::metadata(&tunnel.kubeconfig).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let kubeconfig = Kubeconfig::read_from(&tunnel.kubeconfig).expect("a kubeconfig");
        let server =
            kubeconfig.clusters[0].cluster.clone().and_then(|cluster| cluster.server).expect("a server");
        let server: Uri = server.parse().expect("a URL");
        let port = server.port_u16().expect("a port");
        let answer = get(port, &format!("{}/apis/a?watch=1", server.path())).await;
        assert!(answer.ends_with("/apis/a?watch=1 None"), "{answer}");
        for path in ["/apis/a", "/", "/00000000000000000000000000000000/apis/a"] {
            let answer = get(port, path).await;
            assert!(answer.starts_with("HTTP/1.1 401"), "{answer}");
        }
        let path = tunnel.kubeconfig.clone();
        drop(tunnel);
        assert!(!path.exists());
    }
}
