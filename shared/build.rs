//! Rebuilds the crate when a migration is added: the embedding macro cannot see new files by itself.

fn main() {
    println!("cargo:rerun-if-changed=../migrations/state");
    println!("cargo:rerun-if-changed=../migrations/source");
}
