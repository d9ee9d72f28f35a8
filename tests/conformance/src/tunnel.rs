//! The driver's way to the API server, which can be cut: what is sent is not
//! answered any more, and connections are closed when the way is open again.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use kube::config::Kubeconfig;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::codegen::http::Uri;

/// A port of this machine behind which the API server is, and a kubeconfig that
/// names it.
#[derive(Debug)]
pub(crate) struct Tunnel {
    pub(crate) kubeconfig: PathBuf,
    is_cut: watch::Sender<bool>,
    listening: JoinHandle<()>,
}

impl Tunnel {
    pub(crate) async fn open(kubeconfig: &Kubeconfig) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("no port is free")?;
        let port = listener.local_addr()?.port();
        let (changed, upstream) = through(kubeconfig.clone(), port)?;
        let path =
            std::env::temp_dir().join(format!("dra-conformance-{}-{port}.kubeconfig", std::process::id()));
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let mut file = file.with_context(|| format!("{} cannot be made", path.display()))?;
        // JSON is YAML too.
        file.write_all(serde_json::to_string(&changed)?.as_bytes())?;
        let is_cut = watch::Sender::new(false);
        let listening = tokio::spawn(listen(listener, upstream, is_cut.subscribe()));
        Ok(Self { kubeconfig: path, is_cut, listening })
    }

    pub(crate) fn cut(&self, is_cut: bool) {
        self.is_cut.send_replace(is_cut);
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.listening.abort();
        let _ = std::fs::remove_file(&self.kubeconfig);
    }
}

/// The kubeconfig with its server behind the port, and where that server is.
fn through(mut kubeconfig: Kubeconfig, port: u16) -> Result<(Kubeconfig, String)> {
    let current = kubeconfig.current_context.as_deref();
    let context = kubeconfig.contexts.iter().find(|context| Some(context.name.as_str()) == current);
    let name = context.and_then(|context| context.context.as_ref()).map(|context| context.cluster.clone());
    let name = name.context("the kubeconfig has no current context")?;
    let cluster = kubeconfig.clusters.iter_mut().find(|cluster| cluster.name == name);
    let cluster =
        cluster.and_then(|cluster| cluster.cluster.as_mut()).context("the kubeconfig has no cluster")?;
    let server: Uri =
        cluster.server.as_deref().unwrap_or_default().parse().context("the kubeconfig's server")?;
    let host = server.host().context("the kubeconfig's server has no host")?;
    let scheme = server.scheme_str().unwrap_or("https");
    let standard = if scheme == "http" { 80 } else { 443 };
    let upstream = format!("{host}:{}", server.port_u16().unwrap_or(standard));
    // The certificate is still the server's.
    cluster.tls_server_name.get_or_insert_with(|| host.trim_matches(['[', ']']).to_owned());
    let path = server.path().trim_end_matches('/');
    cluster.server = Some(format!("{scheme}://127.0.0.1:{port}{path}"));
    Ok((kubeconfig, upstream))
}

async fn listen(listener: TcpListener, upstream: String, is_cut: watch::Receiver<bool>) {
    while let Ok((client, _)) = listener.accept().await {
        tokio::spawn(forward(client, upstream.clone(), is_cut.clone()));
    }
}

async fn forward(mut client: TcpStream, upstream: String, mut is_cut: watch::Receiver<bool>) {
    let mut server = None;
    if !*is_cut.borrow() {
        let Ok(connected) = TcpStream::connect(upstream).await else { return };
        let connected = server.insert(connected);
        tokio::select! {
            _ = copy_bidirectional(&mut client, connected) => return,
            _ = is_cut.wait_for(|is_cut| *is_cut) => {}
        }
    }
    // Nothing is said until then; that both ends are closed is the first news.
    let _ = is_cut.wait_for(|is_cut| !*is_cut).await;
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    fn kubeconfig(server: &str) -> Kubeconfig {
        let text = format!(
            "current-context: a\ncontexts: [{{name: a, context: {{cluster: b}}}}]\n\
             clusters: [{{name: c, cluster: {{server: 'https://c'}}}}, {{name: b, cluster: {{server: '{server}'}}}}]\n"
        );
        Kubeconfig::from_yaml(&text).expect("a kubeconfig")
    }

    #[test]
    fn the_server_of_the_current_context_is_behind_the_port() {
        for (server, changed, name, upstream) in [
            ("https://api.example.com", "https://127.0.0.1:7", "api.example.com", "api.example.com:443"),
            ("https://10.0.0.1:6443/", "https://127.0.0.1:7", "10.0.0.1", "10.0.0.1:6443"),
            ("https://[::1]:6443/k8s/a", "https://127.0.0.1:7/k8s/a", "::1", "[::1]:6443"),
        ] {
            let (kubeconfig, found) = through(kubeconfig(server), 7).expect(server);
            let clusters: Vec<_> =
                kubeconfig.clusters.into_iter().filter_map(|cluster| cluster.cluster).collect();
            assert_eq!(found, upstream);
            assert_eq!(clusters[0].server.as_deref(), Some("https://c"));
            assert_eq!(clusters[1].server.as_deref(), Some(changed));
            assert_eq!(clusters[1].tls_server_name.as_deref(), Some(name));
        }
    }

    #[tokio::test]
    async fn what_is_cut_is_silent_and_then_closed() {
        let server = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = server.local_addr().expect("an address");
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = server.accept().await {
                tokio::spawn(async move {
                    let (mut read, mut write) = stream.split();
                    tokio::io::copy(&mut read, &mut write).await
                });
            }
        });
        let tunnel = Tunnel::open(&kubeconfig(&format!("https://{address}"))).await.expect("a tunnel");
        let changed = Kubeconfig::read_from(&tunnel.kubeconfig).expect("a kubeconfig");
        let port: Uri = changed.clusters[1]
            .cluster
            .clone()
            .and_then(|cluster| cluster.server)
            .expect("a server")
            .parse()
            .expect("a URL");
        let connect = || TcpStream::connect(("127.0.0.1", port.port_u16().unwrap_or_default()));
        let mut before = connect().await.expect("a connection");
        before.write_all(b"a").await.expect("sent");
        assert_eq!(before.read_u8().await.expect("echoed"), b'a');
        tunnel.cut(true);
        let mut meanwhile = connect().await.expect("a connection");
        for stream in [&mut before, &mut meanwhile] {
            stream.write_all(b"b").await.expect("taken");
            let silent = tokio::time::timeout(Duration::from_millis(100), stream.read_u8()).await;
            assert!(silent.is_err(), "{silent:?}");
        }
        tunnel.cut(false);
        for mut stream in [before, meanwhile] {
            let mut rest = Vec::new();
            // A reset is an end too.
            stream.read_to_end(&mut rest).await.ok();
            assert_eq!(rest, b"");
        }
        let mut after = connect().await.expect("a connection");
        after.write_all(b"c").await.expect("sent");
        assert_eq!(after.read_u8().await.expect("echoed"), b'c');
    }
}
