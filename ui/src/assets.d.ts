declare module "*.svg" { const url: string; export default url; }
declare module "*.css";
declare module "*?sharedworker&url" { const url: string; export default url; }
