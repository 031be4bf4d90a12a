//! `Ancestry`: the published manifests that the current one descends from, and what leads from each of them to it
//! (protocol version 3, "Connect"; ADR 003, "Stale versus forged cursor dispatch").
//!
//! Pure: whoever reads the manifests hands them over, the newest first. Deliberately absent: scopes. Which of them hold
//! rows of an affected table is the registry's to say.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::{Manifest, SchemaHash, SchemaReference, TransitionClass, classify};

/// Manifests before this many transitions are not known any more: a client that holds one of them is as one of an unknown
/// lineage. Keeps what a puller reads and holds in bounds, however long an installation lives.
pub const MAX_ANCESTORS: usize = 1000;

/// What leads from an older manifest to the current one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Descent {
    /// Transitions of class 2 and 3 alone.
    Compatible {
        /// Ids of the tables whose rows a transition of class 3 asks to materialise anew; none: of class 2 alone.
        affected: Arc<BTreeSet<String>>,
    },
    /// A transition of class 4 is among them.
    Incompatible,
}

/// The manifests that the current one descends from, as far as they were handed over.
#[derive(Clone, Debug)]
pub struct Ancestry {
    ancestors: HashMap<SchemaHash, (u64, Descent)>,
    /// The oldest manifest that was followed, and what leads from it to the current one.
    oldest: Manifest,
    descent: Descent,
}

impl Ancestry {
    /// The current manifest, without its ancestors so far.
    pub fn of(current: Manifest) -> Self {
        Self { ancestors: HashMap::new(), oldest: current, descent: Descent::Compatible { affected: Arc::default() } }
    }

    /// The manifest that [`Self::follow`] takes next; `None` when there is none, or too many were followed.
    pub fn awaited(&self) -> Option<SchemaReference> {
        self.oldest.parent().filter(|_| self.ancestors.len() < MAX_ANCESTORS)
    }

    /// Takes one manifest, in descending order of versions. One that is not the parent of the last is no ancestor, and
    /// ignored.
    ///
    /// The published class counts, and what the tables themselves say where that is more: a manifest of an earlier
    /// release may have been classified by other rules.
    pub fn follow(&mut self, parent: Manifest) {
        if self.awaited() != Some(parent.reference()) {
            return;
        }
        let transition = classify(parent.tables(), self.oldest.tables());
        let said = transition.as_ref().map_or(TransitionClass::Class2, |transition| transition.class);
        let class = self.oldest.transition_class().max(said);
        if class == TransitionClass::Class4 {
            self.descent = Descent::Incompatible;
        } else if let (TransitionClass::Class3, Descent::Compatible { affected }) = (class, &mut self.descent) {
            let tables = transition.map(|transition| transition.affected).unwrap_or_default();
            if tables.is_empty() {
                // Published as class 3 for a reason that is not ours: every table that clients hold may be meant.
                Arc::make_mut(affected).extend(parent.tables().iter().map(|table| table.table_id.clone()));
            } else {
                Arc::make_mut(affected).extend(tables);
            }
        }
        self.ancestors.insert(parent.hash(), (parent.version(), self.descent.clone()));
        self.oldest = parent;
    }

    /// What leads from the manifest of exactly this version and hash to the current one; `None`: it is no ancestor.
    pub fn descent(&self, reference: &SchemaReference) -> Option<&Descent> {
        let (version, descent) = self.ancestors.get(&reference.hash)?;
        (*version == reference.version).then_some(descent)
    }

    /// [`Self::descent`] by the hash alone, which is what tokens are bound to.
    pub fn descent_of(&self, hash: &SchemaHash) -> Option<&Descent> {
        self.ancestors.get(hash).map(|(_, descent)| descent)
    }
}

#[cfg(test)]
mod tests;
