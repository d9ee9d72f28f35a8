//! The cluster's certificates and kubeconfig files. Made once per cluster; the
//! folder appears whole or not at all.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SanType,
};
use serde_json::json;

use super::layout::Layout;
use super::settings::Settings;
use crate::files;

/// Who calls the API server with a certificate: file name, user, group.
const CLIENTS: [(&str, &str, Option<&str>); 4] = [
    ("admin", "kerf-admin", Some("system:masters")),
    ("controller-manager", "system:kube-controller-manager", None),
    ("scheduler", "system:kube-scheduler", None),
    ("apiserver-kubelet-client", "kube-apiserver-kubelet-client", Some("system:masters")),
];

/// Makes what is missing: the certificates, then one kubeconfig a client.
pub(crate) fn ensure(layout: &Layout, settings: &Settings) -> Result<()> {
    if !layout.pki().is_dir() {
        let unfinished = layout.pki().with_extension("new");
        files::remove(&unfinished)?;
        fs::create_dir_all(&unfinished)?;
        make(&unfinished, layout, settings).context("cannot make the cluster's certificates")?;
        fs::rename(&unfinished, layout.pki())?;
    }
    for client in ["admin", "controller-manager", "scheduler", "kubelet"] {
        kubeconfig(layout, settings, client)?;
    }
    Ok(())
}

fn make(folder: &Path, layout: &Layout, settings: &Settings) -> Result<()> {
    let authority_key = KeyPair::generate()?;
    let mut authority = parameters("kerf-cluster", None);
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    let certificate = authority.self_signed(&authority_key)?;
    fs::write(folder.join("ca.crt"), certificate.pem())?;
    let issuer = Issuer::new(authority, authority_key);

    let mut server = parameters("kube-apiserver", None);
    server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    for address in [
        IpAddr::from(settings.service_address()),
        settings.node_address().into(),
        IpAddr::from([127, 0, 0, 1]),
    ] {
        server.subject_alt_names.push(SanType::IpAddress(address));
    }
    for name in ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"] {
        server.subject_alt_names.push(SanType::DnsName(name.try_into()?));
    }
    sign(folder, "apiserver", &server, &issuer)?;

    for (file, user, group) in CLIENTS {
        sign(folder, file, &client(user, group), &issuer)?;
    }
    let node = format!("system:node:{}", layout.node());
    sign(folder, "kubelet", &client(&node, Some("system:nodes")), &issuer)?;

    let tokens = KeyPair::generate()?;
    private(&folder.join("service-accounts.key"), &tokens.serialize_pem())?;
    fs::write(folder.join("service-accounts.pub"), tokens.public_key_pem())?;
    Ok(())
}

fn parameters(name: &str, group: Option<&str>) -> CertificateParams {
    let mut parameters = CertificateParams::default();
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    if let Some(group) = group {
        subject.push(DnType::OrganizationName, group);
    }
    parameters.distinguished_name = subject;
    parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    parameters
}

fn client(user: &str, group: Option<&str>) -> CertificateParams {
    let mut parameters = parameters(user, group);
    parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    parameters
}

fn sign(
    folder: &Path,
    file: &str,
    parameters: &CertificateParams,
    issuer: &Issuer<'_, KeyPair>,
) -> Result<()> {
    let key = KeyPair::generate()?;
    let certificate = parameters.signed_by(&key, issuer)?;
    fs::write(folder.join(format!("{file}.crt")), certificate.pem())?;
    private(&folder.join(format!("{file}.key")), &key.serialize_pem())
}

fn private(path: &Path, content: &str) -> Result<()> {
    fs::write(path, content)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(())
}

/// JSON is YAML, so a kubeconfig may be written as it.
fn kubeconfig(layout: &Layout, settings: &Settings, client: &str) -> Result<()> {
    let pki = layout.pki();
    let content = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{
            "name": layout.node(),
            "cluster": {
                "server": format!("https://{}:443", settings.service_address()),
                "certificate-authority": pki.join("ca.crt"),
            },
        }],
        "users": [{
            "name": client,
            "user": {
                "client-certificate": pki.join(format!("{client}.crt")),
                "client-key": pki.join(format!("{client}.key")),
            },
        }],
        "contexts": [{ "name": client, "context": { "cluster": layout.node(), "user": client } }],
        "current-context": client,
    });
    let path = layout.kubeconfig(client);
    files::replace(&path, &serde_json::to_vec_pretty(&content)?)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    Ok(())
}
