//! The kubelet's gRPC services, generated from `proto/` by `cargo xtask
//! codegen` and committed. Nothing here is written by hand.

macro_rules! generated {
    ($name:ident, $file:literal, $doc:literal) => {
        #[doc = $doc]
        #[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
        pub mod $name {
            include!($file);
        }
    };
}

generated!(registration, "proto/registration.rs", "Plugin registration.");
generated!(dra_v1, "proto/dra_v1.rs", "DRA plugin, v1.");
generated!(dra_v1beta1, "proto/dra_v1beta1.rs", "DRA plugin, v1beta1.");
generated!(health_v1, "proto/health_v1.rs", "Health of devices, v1.");
generated!(health_v1alpha1, "proto/health_v1alpha1.rs", "Health of devices, v1alpha1.");
generated!(podresources, "proto/podresources.rs", "What pods use, as the kubelet tells.");
