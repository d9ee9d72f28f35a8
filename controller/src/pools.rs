//! The publisher's input: pools as they should be, before the API server has
//! given them names, generations and owners.

use k8s_openapi::api::resource::v1::ResourceSliceSpec;
use kerf_dra_driver::layout::PackedSlice;
use kerf_dra_driver::names::DriverName;

/// On whose behalf slices are published. Every slice with this driver and
/// node name is the publisher's to keep or to delete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The driver whose slices these are.
    pub driver: DriverName,
    /// The node that owns them.
    pub node: String,
}

/// Everything that should be published under an [`Identity`]. A pool that is
/// not in it is deleted.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DesiredPools {
    pools: Vec<DesiredPool>,
}

impl DesiredPools {
    /// The pools, in the order in which they are written.
    pub fn pools(&self) -> &[DesiredPool] {
        &self.pools
    }
}

/// Takes slices as a layout makes them: each names its pool, and those of one
/// pool stand in index order. The allocator reads slices by name, and names
/// begin with the index. Driver, node and the pool's generation and count are
/// filled in by the publisher.
impl FromIterator<PackedSlice> for DesiredPools {
    fn from_iter<T: IntoIterator<Item = PackedSlice>>(slices: T) -> Self {
        let mut pools: Vec<DesiredPool> = Vec::new();
        for slice in slices {
            match pools.iter_mut().find(|pool| pool.name == slice.pool()) {
                Some(pool) => pool.slices.push(slice),
                None => pools.push(DesiredPool { name: slice.pool().to_owned(), slices: vec![slice] }),
            }
        }
        Self { pools }
    }
}

/// One pool as it should be. It has at least one slice: readers tell an empty
/// pool from a missing one by it.
#[derive(Debug, Clone, PartialEq)]
pub struct DesiredPool {
    name: String,
    slices: Vec<PackedSlice>,
}

impl DesiredPool {
    /// The pool's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The slices in index order, at least one.
    ///
    /// # Errors
    /// None that is known; see [`PackedSlice::unpack`].
    pub fn slices(&self) -> Result<Vec<ResourceSliceSpec>, serde_json::Error> {
        self.slices.iter().map(PackedSlice::unpack).collect()
    }

    /// Changes every slice.
    pub(crate) fn change(
        &mut self,
        change: impl Fn(&mut ResourceSliceSpec),
    ) -> Result<(), serde_json::Error> {
        for packed in &mut self.slices {
            let mut slice = packed.unpack()?;
            change(&mut slice);
            *packed = PackedSlice::pack(&slice)?;
        }
        Ok(())
    }
}
